"""Planning: the recipe, the linears and attention modules it replaces, and the allocation of a parameter budget."""
