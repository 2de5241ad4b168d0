"""vLLM's metadata of a step for layers with a mixer: borders and lengths of the requests, and their rows of the cache.

vLLM makes it once a step and group of caches, not once a layer. Borders and lengths come from the CPU, where vLLM has
them, so no layer waits for the GPU; rows and lengths on the device lie in buffers made once.

Where a kernel computes the decodes of every mixer in place (kernels/window_step), CUDA graphs hold whole decoding steps:
the kernel takes rows and lengths from the buffers, and is launched in the same way for all lengths. Other mixers run
operations that depend on lengths. With one of them in the model the level is NEVER, and vLLM captures what lies between
the mixers (cudagraph mode PIECEWISE). Prompts, and steps with a piece of a prompt, are never captured whole.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from surgery.mixers.common.request_rows import write_request_rows
from surgery.vllm.mixer_state import Batch


@dataclass
class MixerMetadata(BaseMambaAttentionMetadata):
    """vLLM's metadata of state layers, and the step's requests as mixers take them."""

    batch: Batch | None = None


class MixerMetadataBuilder(BaseMambaAttentionMetadataBuilder[MixerMetadata]):
    """Makes the metadata of a step without waiting for the GPU.

    rows_R, seen_R: buffers of a fixed address for the largest batch, int32. Entries of padding are row NULL_BLOCK_ID,
    which belongs to no request, and -1 tokens.
    """

    metadata_cls = MixerMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER  # see `get_cudagraph_support`
    supports_update_block_table: bool = False  # the rows are part of the batch
    needs_causal_conv1d_metadata: bool = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        size = vllm_config.scheduler_config.max_num_seqs
        self.rows_R = torch.full((size,), NULL_BLOCK_ID, dtype=torch.int32, device=device)
        self.seen_R = torch.full((size,), -1, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return which steps a CUDA graph may hold: those of one token for each request, if a kernel computes them in
        every layer with a mixer."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        if all(layer.steps_in_place for layer in layers if hasattr(layer, "steps_in_place")):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any
    ) -> MixerMetadata:
        """Return the metadata of a step."""
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        # An upper bound only with speculative decoding, which `check_engine` refuses.
        lengths = common.seq_lens_cpu_upper_bound[:count].tolist()
        starts = common.query_start_loc_cpu[: count + 1].tolist()
        if common.max_query_len <= 1 and 1 not in lengths:
            metadata = self.decodes(common)
        else:  # vLLM counts a first piece of one token among the prompts
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        self.write_rows(common.block_table_tensor, common.seq_lens[:count], common.query_start_loc)
        metadata.batch = Batch(metadata.num_decodes, starts, lengths, self.rows_R[:count], self.seen_R[:count])
        return metadata

    def decodes(self, common: Any) -> MixerMetadata:
        """Return what vLLM's own builder makes of a step of one token for each request, without its tensors of rows, which
        no mixer reads: they take 20 small operations for each group of caches and step."""
        absent = {f.name: None for f in fields(self.metadata_cls) if f.default is MISSING}
        known = {
            "num_prefills": 0,
            "num_prefill_tokens": 0,
            "num_decodes": common.num_reqs,
            "num_decode_tokens": common.num_actual_tokens,
            "num_reqs": common.num_reqs,
            "seq_lens": common.seq_lens,
        }
        return self.metadata_cls(**(absent | known))

    def write_rows(self, page_RP: Tensor, length_R: Tensor, start_R: Tensor) -> None:
        """Write rows and lengths of the requests to the buffers. page_RP: vLLM's table of blocks. length_R: 0 for padding.

        A graph may read more entries than there are requests: those behind them become padding.
        """
        is_aligned = self.vllm_config.cache_config.mamba_cache_mode == "align"
        block = self.kv_cache_spec.block_size if is_aligned else 0
        write_request_rows(length_R, start_R, page_RP, self.rows_R, self.seen_R, block=block, no_page=NULL_BLOCK_ID)


class MixerBackend(AttentionBackend):
    """The attention backend of layers with a mixer."""

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's messages."""
        return "SURGERY"

    @staticmethod
    def get_builder_cls() -> type[MixerMetadataBuilder]:
        """Return the class that makes the metadata."""
        return MixerMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Return True: the cache holds states."""
        return True


def register_mixer_backend() -> None:
    """Make vLLM use this backend for layers of the type CUSTOM."""
    path = f"{MixerBackend.__module__}.{MixerBackend.__qualname__}"
    register_backend(MambaAttentionBackendEnum.CUSTOM, path, is_mamba=True)
