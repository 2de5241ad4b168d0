"""Calibration on pairs of texts, and on a folder of images through the checkpoint's processor."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from helpers import tiny_multimodal as families
from helpers.small import make_recipe, tiny_config
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from surgery.calibration.data import read_labels
from surgery.calibration.images import image_inputs, join_rows
from surgery.calibration.inputs import checkpoint_inputs
from surgery.calibration.pairs import pair_inputs, read_pairs
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(80))]


def words_tokenizer():
    """A word is a token; a text ends with [SEP]; `<image>` is the placeholder of an image."""
    names = {word: i for i, word in enumerate(WORDS)} | {"<image>": families.IMAGE_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 2)])
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[SEP]"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **special)
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return made


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(first, count):
    return " ".join(f"w{(first + i) % 80}" for i in range(count))


PAIRS = [{"input": text(i, 5 + i % 3), "target": text(3 * i, 4 + i % 2)} for i in range(8)]


# -- pairs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder_is_calibrated_on_pairs(name, tmp_path):
    model, folder = families.make_model(name), tmp_path / "source"
    model.save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    found = checkpoint_inputs(
        str(write_lines(tmp_path / "pairs.jsonl", PAIRS)), folder, model.config, 512, 64, notes=[]
    )
    assert found["input_ids"].shape == (8, 8) and found["labels"].shape == (8, 6)
    assert found["attention_mask"].sum(1).tolist() == [6 + i % 3 for i in range(8)]
    with torch.inference_mode():
        loss = model(**found).loss
        inputs = read_labels(found, model)
        logits = model(**{k: v for k, v in inputs.items() if k != "decoder_attention_mask"}).logits
    targets = found["labels"][:, : logits.shape[1]]
    again = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(loss, again, atol=1e-5)  # decoder_input_ids are the labels, one position later
    recipe = make_recipe(structure="low_rank", keep=0.6, sweeps=0, calibration=tmp_path / "pairs.jsonl", tokens=512)
    report = convert(str(folder), recipe, tmp_path / "out")
    assert report["held_out"]["unit"] == "nats per token" and "unreached" not in report
    # Held out are the last two pairs, of 5 and 6 labels; the decoder reads all labels but the last of the longest.
    assert report["held_out"]["tokens"] == 5 + 5


def test_masks_of_one_length_are_told_apart_by_a_shorter_decoder():
    ids = torch.ones(2, 6, dtype=torch.int64)
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    labels = torch.tensor([[5] * 6, [6, 7, -100, -100, -100, -100]])
    model = families.make_model("bart")
    found = read_labels({"input_ids": ids, "attention_mask": mask, "labels": labels}, model)
    assert found["decoder_input_ids"].tolist() == [[0, 5, 5, 5, 5], [0, 6, 7, 0, 0]]
    assert found["decoder_attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    "rows, says",
    [
        ([PAIRS[0], {"input": "w1"}], "line 2 needs texts under 'input' and 'target'"),
        ([PAIRS[0], "no pair"], "line 2 needs texts"),
        ([PAIRS[0], {"input": "w1", "target": ""}], "line 2 needs texts"),
    ],
)
def test_lines_that_are_no_pairs_are_refused(rows, says, tmp_path):
    with pytest.raises(SurgeryError, match=says):
        read_pairs(write_lines(tmp_path / "pairs.jsonl", rows))


def test_a_line_ends_at_a_line_end_alone(tmp_path):
    """JSON may hold U+2028 and the like as they are, at which str.splitlines would cut."""
    row = {"input": "w1\u2028w2\x85", "target": "w3"}
    (tmp_path / "pairs.jsonl").write_bytes(f"{json.dumps(row, ensure_ascii=False)}\r\n".encode() * 2)
    assert read_pairs(tmp_path / "pairs.jsonl") == [("w1\u2028w2\x85", "w3")] * 2


def test_a_single_pair_is_refused_and_texts_are_no_pairs(tmp_path):
    with pytest.raises(SurgeryError, match="at least two pairs"):
        pair_inputs([("w1", "w2")], words_tokenizer(), 100, 10, "pairs.jsonl")
    assert read_pairs(write_lines(tmp_path / "texts.jsonl", [{"text": "w1 w2"}])) is None
    (tmp_path / "broken.jsonl").write_text("{")
    assert read_pairs(tmp_path / "broken.jsonl") is None


# -- images ----------------------------------------------------------------------------------------
def write_images(folder, count, captions=True, sizes=((20, 20),)):
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    if captions:
        rows = [{"file_name": f"{i}.png", "text": text(i, 3 + i % 2)} for i in range(count)]
        write_lines(folder / "metadata.jsonl", rows)
    return folder


def image_processor(**keys):
    size = {"height": families.IMAGE_SIZE, "width": families.IMAGE_SIZE}
    return transformers.CLIPImageProcessorPil(size=size, crop_size=size, **keys)


def save_source(name, folder):
    model = families.make_model(name)
    model.save_pretrained(folder)
    if name == "llava":
        kind, keys = transformers.LlavaProcessor, {"patch_size": 4, "vision_feature_select_strategy": "default"}
        keys |= {"num_additional_image_tokens": 1, "image_token": "<image>"}
    else:
        kind, keys = transformers.CLIPProcessor, {}
    kind(image_processor(), words_tokenizer(), **keys).save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["llava", "clip"])
def test_a_folder_of_images_calibrates_both_towers(name, tmp_path):
    model = save_source(name, tmp_path / "source")
    images = write_images(tmp_path / "images", 6)
    found = checkpoint_inputs(str(images), tmp_path / "source", model.config, 10_000, 64, notes=[])
    assert found["pixel_values"].shape == (6, 3, families.IMAGE_SIZE, families.IMAGE_SIZE)
    placeholders = (found["input_ids"] == families.IMAGE_TOKEN).sum(1).tolist()
    assert placeholders == [16 if name == "llava" else 0] * 6
    recipe = make_recipe(structure="low_rank", keep=0.6, sweeps=0, curvature="none", calibration=images, towers="all")
    report = convert(str(tmp_path / "source"), recipe, tmp_path / "out")
    assert any("vision" in record["name"] for record in report["modules"])
    assert (tmp_path / "out" / "processor_config.json").is_file()
    transformers.AutoProcessor.from_pretrained(tmp_path / "out")


def test_a_vision_model_reads_a_folder_with_its_image_processor(tmp_path):
    cls, config = tiny_config("vit")
    cls(config).save_pretrained(tmp_path / "source")
    image_processor().save_pretrained(tmp_path / "source")
    images = write_images(tmp_path / "images", 5, captions=False)
    found = checkpoint_inputs(str(images), tmp_path / "source", config, 128, 64, notes=[])
    assert {name: tuple(x.shape) for name, x in found.items()} == {"pixel_values": (2, 3, 16, 16)}  # 64 tokens an image


def test_images_of_several_sizes_are_resized_where_the_processor_does_not(tmp_path):
    cls, config = tiny_config("vit")
    cls(config).save_pretrained(tmp_path / "source")
    image_processor(do_resize=False, do_center_crop=False).save_pretrained(tmp_path / "source")
    images, notes = write_images(tmp_path / "images", 4, False, sizes=((16, 16), (24, 20))), []
    found = image_inputs(images, tmp_path / "source", config, 4096, notes=notes)
    assert found["pixel_values"].shape == (4, 3, 16, 16) and "resized to 16 x 16" in notes[0]


def test_rows_of_several_lengths_are_padded_and_masked():
    rows = [{"input_ids": torch.ones(1, n, dtype=torch.int64), "image_grid_thw": torch.ones(1, 3)} for n in (2, 4)]
    found = join_rows(rows)
    assert found["input_ids"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert found["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]] and found["image_grid_thw"].shape == (2, 3)


@pytest.mark.parametrize(
    "how, says",
    [
        ("none", "must hold at least two images"),
        ("broken", r"1\.png is not an image that can be read"),
        ("captions", "has no text for 3.png"),
        ("line", "metadata.jsonl, line 1 must be"),
        ("no captions", "this model reads an image and a text"),
        ("no processor", "has no processor of images"),
    ],
)
def test_folders_that_are_refused(how, says, tmp_path):
    model = save_source("clip", tmp_path / "source")
    images = write_images(tmp_path / "images", 1 if how == "none" else 4, captions=how != "no captions")
    if how == "broken":
        (images / "1.png").write_bytes(b"\x89PNG\r\n")
    elif how == "captions":
        write_lines(images / "metadata.jsonl", [{"file_name": f"{i}.png", "text": "w1"} for i in range(3)])
    elif how == "line":
        (images / "metadata.jsonl").write_text('["0.png"]\n')
    elif how == "no processor":
        for name in ("processor_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / "source" / name).unlink(missing_ok=True)
    with pytest.raises(SurgeryError, match=says):
        checkpoint_inputs(str(images), tmp_path / "source", model.config, 4096, 64, notes=[])
