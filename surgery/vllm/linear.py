"""Structured linears in vLLM's models: the table of a checkpoint as a quantization config, and the methods of its
layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from surgery.checkpoint.table import QUANT_METHOD
from surgery.core.errors import SurgeryError
from surgery.modeling.joined import sibling
from surgery.modeling.quantization_config import SurgeryConfig
from surgery.vllm.packed_linear import PackedLinear, Shard, Side
from surgery.vllm.servable import OWN_CLASSES, check_checkpoint, check_rope


class SurgeryTable(QuantizationConfig):
    """The table of replaced linears. modules: entries by the path of the linear; found: the paths that layers have
    taken; joined: the methods and layers that hold a matrix of joined linears, by path."""

    def __init__(self, modules: dict[str, Any]):
        super().__init__()
        self.modules, self.found = modules, set[str]()
        self.joined: dict[str, tuple[LinearMethod, nn.Module]] = {}

    def get_name(self) -> str:
        """Return the quant_method of config.json."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which models run."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least CUDA capability, times ten: that of vLLM itself."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return [], because config.json holds the table."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SurgeryTable:
        """Return the table of config.json's `quantization_config`."""
        return cls(dict(SurgeryConfig(**config).modules))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> None:
        """Return None: no other method is replaced. Raises SurgeryError if the user asks for one with a converted
        checkpoint, for example FP8."""
        if hf_quant_cfg.get("quant_method") == QUANT_METHOD and user_quant not in (None, QUANT_METHOD):
            raise SurgeryError(
                f"--quantization {user_quant} is not for converted checkpoints: vLLM's methods quantize dense matrices "
                "while they are loaded, and factors have no such products. Leave it out; `surgery quantize` stores "
                "factors in 8 or 4 bits, which vLLM then serves"
            )

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Raise SurgeryError unless the checkpoint's files hold exactly the tensors of its table and config.

        vLLM calls this while it makes its config, before a model is built.
        """
        if Path(model_name).is_dir():
            with current_config(hf_config):
                check_checkpoint(model_name)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the paths as the model class renames its modules."""
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer: structured, dense, or None for layers that are no linears.

        Raises SurgeryError for structured layers that are not served, and for options of the engine that are refused.
        """
        check_one_stage()
        check_options(get_current_vllm_config())
        head, _, name = prefix.rpartition(".")
        paths = [f"{head}.{member}" if head else member for member in self.packed_modules_mapping.get(name, [name])]
        paths = [prefix] if prefix in self.modules else paths
        entries = [self.modules.get(path) for path in paths]
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            self.found.update(path for path, entry in zip(paths, entries) if entry)
            if not any(entries):
                return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else UnquantizedEmbeddingMethod()
            return (
                HeadMethod(self, entries, prefix)
                if isinstance(layer, ParallelLMHead)
                else LinearMethod(self, entries, prefix)
            )
        below = [path for path in self.modules if path == prefix or path.startswith(f"{prefix}.")]
        if below and type(layer).__name__ in ("RoutedExperts", "FusedMoE", "VocabParallelEmbedding"):
            raise SurgeryError(
                f"{below[0]} is structured and lies in a {type(layer).__name__}, which vLLM computes by kernels of its "
                "own. Use "
                "`transformers serve`, or densify"
            )
        return None

    def check_found(self) -> None:
        """Raise SurgeryError if an entry of the table has not become a layer."""
        if unmatched := sorted(self.modules.keys() - self.found):
            raise SurgeryError(
                f"vLLM's model has no linear for {len(unmatched)} entries of the surgery table, such as "
                f"{unmatched[0]!r}. Serve it through the "
                "Transformers backend (--model-impl transformers), or with `transformers serve`"
            )


@contextmanager
def current_config(hf_config: Any) -> Iterator[None]:
    """Give vLLM a current config without compilation: classes that an earlier engine's Transformers backend has
    decorated ask for one when a model is built on meta."""
    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.NONE
    config.model_config = SimpleNamespace(hf_config=hf_config)
    with set_current_vllm_config(config):
        yield


def check_one_stage() -> None:
    """Raise SurgeryError if the layers of the model are spread over several processes."""
    if (count := get_pp_group().world_size) > 1:
        raise SurgeryError(
            f"converted checkpoints are served without pipeline parallelism (got {count} processes). Use "
            "--pipeline-parallel-size 1"
        )


def check_options(vllm_config: Any) -> None:
    """Raise SurgeryError for options of the engine with which a converted checkpoint would give wrong tokens or none."""
    model, name = vllm_config.model_config, vllm_config.model_config.model
    if vllm_config.load_config.load_format == "dummy":
        raise SurgeryError(
            f"{name} is converted, and --load-format dummy has random numbers where its linears have tables and factors. "
            "Leave it out"
        )
    if model.architecture not in OWN_CLASSES:  # of vLLM, which choose the frequencies by --max-model-len
        check_rope(model.hf_config.to_dict(), model.max_model_len, str(name))


class LinearMethod(LinearMethodBase):
    """Method of a linear of which at least one part is structured: its tensors, their loading, and the product.

    Every tensor is a parameter of the layer with a `weight_loader` of its own, under its name in the checkpoint. Names
    with dots, of fused linears whose roles were replaced apart, become modules.
    """

    def __init__(self, table: SurgeryTable, entries: list[dict[str, Any] | None], path: str):
        self.table, self.entries, self.path = table, entries, path

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the tensors of all parts as parameters of the layer. The sizes are those of one process."""
        if getattr(layer, "num_kv_head_replicas", 1) > 1:
            raise SurgeryError(
                f"{self.path}: {get_tensor_model_parallel_world_size()} processes must divide the key/value heads of the "
                "model, of which it has fewer. Use a smaller --tensor-parallel-size"
            )
        shard = self.make_shard(layer, input_size_per_partition, output_partition_sizes, input_size, output_size)
        times = shard.count if shard.side == "out" else 1
        outs = [size * times for size in self.part_sizes(layer, output_partition_sizes)]
        self.packed = PackedLinear(self.entries, input_size, tuple(outs), params_dtype, shard)
        self.ids: list[Any] = list(range(len(self.entries)))
        if isinstance(layer, QKVParallelLinear) and len(self.entries) == 3:
            self.ids = ["q", "k", "v"]
        for name, (size, dtype) in self.packed.tensors.items():
            flat: Any = nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)
            flat.weight_loader = self.loader(name)
            register(layer, name, flat)
        if len(self.packed.joined) == len(self.entries) == 1 and not self.packed.follows:
            self.table.joined[self.path] = self, layer

    def make_shard(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
    ) -> Shard:
        """Return which slice of the linear this process computes."""
        side: Side = "in" if isinstance(layer, RowParallelLinear) else "out"
        local = input_size_per_partition if side == "in" else sum(output_partition_sizes)
        count = (input_size if side == "in" else output_size) // local
        segments: tuple[int, ...] = ()
        if side == "out" and len(self.entries) == 1 < len(output_partition_sizes):
            segments = tuple(size * count for size in output_partition_sizes)
        return Shard(getattr(layer, "tp_rank", 0) if count > 1 else 0, count, side, segments)

    def part_sizes(self, layer: Any, output_partition_sizes: list[int]) -> list[int]:
        """Return the outputs of each part on one process."""
        if len(self.entries) == 1:
            return [sum(output_partition_sizes)]
        return list(output_partition_sizes)

    def loader(self, name: str) -> Any:
        """Return the function with which vLLM loads a tensor of that name into its parameter."""

        def load(param: Tensor, loaded: Tensor, shard_id: Any = None) -> None:
            if param.is_meta:  # what vLLM's reload_weights makes of loaded parameters, in any order of their parts
                raise SurgeryError(
                    f"{self.path}: weights of a converted checkpoint are loaded once (reload_weights is refused). Start "
                    "the engine again"
                )
            part = 0 if shard_id is None and len(self.ids) == 1 else self.ids.index(shard_id)
            try:
                self.packed.copy_part(param, name, part, loaded)
            except SurgeryError as error:
                raise SurgeryError(f"{self.path}: {error}") from None

        return load

    def tensors(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the layer's parameters by their name in the checkpoint."""
        return {name: attrgetter(name)(layer) for name in self.packed.tensors}

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raise SurgeryError if a tensor of this layer, or a layer of the table, is missing."""
        self.packed.check_complete(self.path, self.tensors(layer))
        if self.packed.follows and sibling(self.path, self.packed.follows) not in self.table.joined:
            raise SurgeryError(
                f"{self.path} takes rows of a matrix of {self.packed.follows}, which vLLM's model computes elsewhere. "
                "Use `transformers serve`"
            )
        self.table.check_found()
        if self.packed.has_biases and getattr(layer, "bias", None) is not None:
            layer.get_parameter("bias").data.zero_()  # the parts hold the biases; vLLM's own was not loaded

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the linear map of x: (.., in) -> (.., out)."""
        if self.packed.follows:
            first, holder = self.table.joined[sibling(self.path, self.packed.follows)]
            y = self.packed.local_rows(first.packed.whole(first.tensors(holder), x))
        else:
            y = self.packed(self.tensors(layer), x)
        return y if bias is None else y + bias


class HeadMethod(LinearMethod):
    """Method of a structured lm_head. vLLM pads the vocabulary; logits of the padding are dropped after the product.

    With tensor parallelism each process computes all logits and keeps its slice of the padded vocabulary.
    """

    def make_shard(self, *sizes: Any) -> Shard:
        """Return the whole linear."""
        return Shard()

    def part_sizes(self, layer: Any, output_partition_sizes: list[int]) -> list[int]:
        """Return the outputs of the head without padding."""
        return [int(layer.org_vocab_size)]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of x: (.., in) -> (.., padded vocabulary)."""
        y = self.packed(self.tensors(layer), x)
        y = F.pad(y, (0, int(layer.num_embeddings_padded) - y.shape[-1]))
        y = Shard(get_tensor_model_parallel_rank(), int(layer.tp_size)).outputs(y)
        return y if bias is None else y + bias

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Raise SurgeryError: the head of this checkpoint has weights of its own."""
        raise SurgeryError(
            f"{self.path} is structured, and config.json ties it to the embedding (tie_word_embeddings): they do not "
            "belong together. "
            "Convert the checkpoint again"
        )


def register(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a name that may have dots, with modules for the parts before the last dot."""
    *parents, leaf = name.split(".")
    for parent in parents:
        if not hasattr(layer, parent):
            layer.add_module(parent, nn.Module())
        layer = getattr(layer, parent)
    layer.register_parameter(leaf, parameter)
