"""A script for a process without this package, which runs checkpoints as transformers alone would."""

# folder -> outputs of its model for folder-inputs.safetensors, written to folder-outputs.pt
STOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "surgery":
            raise ImportError("surgery is blocked")
sys.meta_path.insert(0, Blocked())
import torch, transformers
from safetensors.torch import load_file
for folder in sys.argv[1:]:
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model, info = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.inference_mode():
        torch.save(model.eval()(**load_file(folder + "-inputs.safetensors"))[0], folder + "-outputs.pt")
assert not any(name.partition(".")[0] == "surgery" for name in sys.modules)
"""
