"""What transformers and peft call at run time: replaced modules, attention, caches, the quantizer that loads them."""
