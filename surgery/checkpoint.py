def quantization_table(table): return {"quant_method":"surgery","modules":table}
def write_shims(*a): pass
