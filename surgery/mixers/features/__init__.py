"""Feature maps phi of kernel scores A = phi(Q) phi(K)^T, one file for each kind."""
