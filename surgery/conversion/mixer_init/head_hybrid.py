"""Initialize a hybrid by heads: each part's mixer, from the outputs of the original heads that it takes the place
of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from surgery.calibration.attention_samples import AttentionSample, AttentionSamples
from surgery.conversion.mixer_init.base import MIXER_INITS, InitializedMixer, MixerInit, build_mixer, select_init
from surgery.mixers.head_hybrid import HeadHybrid, HeadHybridAttention, query_heads, select_heads
from surgery.mixers.softmax import SoftmaxAttention
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe


class HeadSamples(AttentionSamples):
    """The samples of a layer's attention, cut to the heads of one part of a hybrid by heads. is_softmax: of the
    softmax heads.
    """

    def __init__(self, samples: AttentionSamples, mixer: HeadHybridAttention, is_softmax: bool):
        self.samples, self.mixer, self.is_softmax = samples, mixer, is_softmax
        attention = mixer.softmax if is_softmax else mixer.others
        self.group_N = mixer.kept_N if is_softmax else mixer.rest_N
        self.head_N = query_heads(self.group_N, mixer.shape)
        self.target = replace(samples.target, shape=attention.shape, config=attention.config, fixed={})

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[AttentionSample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> AttentionSample:
        sample = self.samples[i]
        return AttentionSample(
            self.mixer.part_inputs(sample.inputs, self.is_softmax),
            select_heads(sample.teacher, self.group_N, self.mixer.shape),
            sample.target_BHTV.index_select(1, self.head_N),
        )

    def output_OI(self) -> Tensor:
        """Return the columns of the output projection's weight that read these heads, (O, N V)."""
        weight_OHV: Tensor = self.samples.output_OI().unflatten(1, (self.mixer.shape.heads, -1))
        return weight_OHV.index_select(1, self.head_N).flatten(1)


@MIXER_INITS.register(HeadHybrid)
class HeadHybridInit(MixerInit):
    """Initialization of a hybrid by heads.

    Its errors are those of the heads without softmax, relative to their original outputs, and those of the softmax
    heads if these have no RoPE.
    """

    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        """Return the mixer with its parts initialized."""
        mixer = build_mixer(target, fit[0].inputs.q_BHTK.device)
        assert isinstance(mixer, HeadHybridAttention)
        samples = HeadSamples(fit, mixer, False), HeadSamples(held, mixer, False)
        others = samples[0].target
        initialized = select_init(others.config, settings).init(others, settings, *samples)
        mixer.others, errors = initialized.mixer, dict(initialized.errors)
        if mixer.softmax.sharpness_H is not None:
            softmax_samples = HeadSamples(fit, mixer, True), HeadSamples(held, mixer, True)
            softmax = select_init(softmax_samples[0].target.config, settings).init(
                softmax_samples[0].target, settings, *softmax_samples
            )
            assert isinstance(softmax.mixer, SoftmaxAttention)
            mixer.softmax = softmax.mixer
            errors |= {f"softmax heads, {stage}": error for stage, error in softmax.errors.items()}
        return InitializedMixer(mixer, errors)
