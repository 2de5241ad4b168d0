"""What looks like a secret is not uploaded; what a conversion writes contains nothing that does."""

from __future__ import annotations

import json
import random
import shutil
import string
from pathlib import Path

import pytest

from surgery.core.errors import SurgeryError
from surgery.publish.hub.files import redact_secrets
from surgery.publish.hub.push import prepare_upload
from surgery.publish.hub.secret_scan import RULES, find_secrets, mask_secrets

ROOT = Path(__file__).resolve().parents[2]
DRAWN = random.Random(0)


def draw(length: int, letters: str = string.ascii_letters + string.digits) -> str:
    """Return random characters: no secret stands in this file, and scanners of the repository find none."""
    return "".join(DRAWN.choice(letters) for _ in range(length))


UPPER, HEX = string.ascii_uppercase + string.digits, string.digits + "abcdef"
SECRETS = {
    "Hugging Face token": "hf_" + draw(34),
    "GitHub token": "ghp_" + draw(36),
    "GitHub fine-grained token": "github_pat_" + draw(82),
    "GitLab token": "glpat-" + draw(20),
    "AWS access key": "AKIA" + draw(16, UPPER),
    "AWS temporary key": "ASIA" + draw(16, UPPER),
    "AWS secret key": f"aws_secret_access_key = {draw(40)}",
    "Google API key": "AIza" + draw(35),
    "OpenAI key": "sk-proj-" + draw(48),
    "Anthropic key": "sk-ant-api03-" + draw(95),
    "Slack bot token": f"xoxb-{draw(12, string.digits)}-{draw(12, string.digits)}-{draw(24)}",
    "Slack webhook": f"https://hooks.slack.com/services/T{draw(8, UPPER)}/B{draw(8, UPPER)}/{draw(24)}",
    "npm token": "npm_" + draw(36),
    "npm registry": f"//registry.npmjs.org/:_authToken={draw(8, HEX)}-{draw(4, HEX)}-{draw(4, HEX)}-{draw(4, HEX)}-{draw(12, HEX)}",
    "PyPI token": "pypi-AgEIcHlwaS5vcmc" + draw(80),
    "JSON web token": f"eyJ{draw(20)}.eyJ{draw(40)}.{draw(43)}",
    "Azure storage": f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={draw(86)}==;EndpointSuffix=core.windows.net",
    "Azure service bus": f"Endpoint=sb://me.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey={draw(43)}=",
    "Azure client secret": f"{draw(3)}8Q~{draw(34)}",
    "Azure signature": f"https://me.blob.core.windows.net/c/f?sv=2024-11-04&sig={draw(43)}%3D",
    "Azure API key": f"AZURE_OPENAI_API_KEY={draw(32, HEX)}",
    "password in a URL": "https://user:password@host/path",
    "database": f"postgresql://me:{draw(9)}@db.example.com:5432/x",
    "private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "Weights & Biases": f"WANDB_API_KEY={draw(40, HEX)}",
    "bearer": f"Authorization: Bearer {draw(40)}",
    "option": f"curl --password {draw(10)}7a4 x",
    "option in a list": json.dumps(["x", "--api-key", draw(28) + "7a4"]),
    "YAML": f"client_secret: {draw(30)}42",
    "Databricks token": "dapi" + draw(32, HEX),
    "SendGrid key": f"SG.{draw(22)}.{draw(43)}",
    "Stripe key": "sk_live_" + draw(24),
    "Telegram": f"{draw(10, '123456789')}:AA{draw(33)}",
    "Vault": "hvs." + draw(90),
}  # fmt: skip
HARMLESS = [
    f'"sha256": "{draw(64, HEX)}", "fingerprint": "{draw(64, HEX)}", "revision": "{draw(40, HEX)}"',
    f"'sha256-{draw(43)}='",
    '{"pad_token": "<|endoftext|>", "bos_token": "<s>", "extra_special_token_id": 50256, "cls_token": "[CLS]"}',
    '{"password": 28319, "Ġsecret": 3200, "token": 1, "api_key": 40123456789012345}',
    "model.layers.0.self_attn.q_proj.weight",
    'model = AutoModel.from_pretrained("org/name", token="hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")',
    "export HF_TOKEN=$HF_TOKEN; OPENAI_API_KEY={your_key_of_32_letters_and_1_digit}",
    "https://user:***@host and https://$USER:${PASSWORD}@host and https://{user}:{password}@host",
    "self.embed_tokens = M2M100ScaledWordEmbedding(config)",
    "private_key: /home/me/keys/id_rsa_2048.pem",
    "ssh://git@github.com:22/me/x and http://localhost:8080/@scope/x",
    "cache_key: " + draw(64, HEX),
    "--tokens 65536 --token-budget 1024",
    "sk-learn-like-class-names-of-a-style-sheet and task-specific-heads-for-classification",
    "-----BEGIN PUBLIC KEY-----",
]


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_secrets_are_found_by_line_and_masked(text):
    """In logs, in JSON with its escapes, and in HTML; what is masked is found no more, and no part of it is told."""
    import html

    for shown in (
        text,
        json.dumps({"command": f"run\n{text}\n"}),
        html.escape(f'<p>"{text}"</p>'),
        json.dumps(text).replace("/", "\\/"),
    ):
        (finding, *others) = find_secrets(f"first line\n{shown}\nlast line {draw(5)}".encode())
        assert finding.line == 2 and all(each.line == 2 for each in others)
        assert not any(part in finding.kind for part in text.split() if len(part) > 12)
    masked = mask_secrets(text)
    assert "***" in masked and not find_secrets(masked.encode()) and mask_secrets(masked) == masked
    assert redact_secrets({"command": [text]}) == {"command": [masked]}


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_is_not_found(text):
    assert find_secrets(text.encode()) == []
    assert mask_secrets(text) == text or "hf_xxx" in text  # which masks a token whatever its letters are


def test_every_rule_has_a_secret_to_mask_and_words_that_it_contains():
    for rule in RULES:
        assert "secret" in rule.pattern.groupindex and all(word == word.lower() for word in rule.words)


def test_nothing_of_the_embedded_checkpoint_and_the_docs_is_taken_for_a_secret():
    """Tokenizers, configs, model cards, logs and reports of a real model, and all documentation of this repository."""
    files = [
        p for p in (ROOT / "recipes" / "tiny" / "checkpoint").rglob("*") if p.is_file() and p.suffix != ".safetensors"
    ]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert len(files) > 20 and {p.name: found for p in files if (found := find_secrets(p.read_bytes()))} == {}


@pytest.fixture
def out(converted, tmp_path) -> Path:
    folder = tmp_path / "OUT"
    shutil.copytree(converted("llama"), folder)
    (folder / "training").mkdir()
    (folder / "training" / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    return folder


def test_a_push_names_file_line_and_kind_and_never_the_value(out):
    prepare_upload(str(out), "me/small", "mit")  # what a conversion writes passes
    report = json.loads((out / "surgery_report.json").read_text())
    slack, password = SECRETS["Slack bot token"], draw(12)
    (out / "surgery_report.json").write_text(
        json.dumps({**report, "command": f"git clone https://me:{password}@host/x"})
    )
    with open(out / "training" / "log.jsonl", "a") as log:
        log.write(json.dumps({"hook": f"token {slack}"}) + "\n")
    with pytest.raises(SurgeryError) as error:
        prepare_upload(str(out), "me/small", "mit")
    said = str(error.value)
    assert (
        "training/log.jsonl, line 3 (Slack token)" in said and "surgery_report.json, line 1 (password in a URL)" in said
    )
    assert "Nothing was sent" in said and slack not in said and slack[5:] not in said and password not in said


def test_headers_of_weights_are_read_too(out):
    from safetensors.torch import load_file, save_file

    path = out / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "args": f"--key {SECRETS['GitLab token']}"})
    with pytest.raises(SurgeryError, match=r"model\.safetensors, line 1 \(GitLab token\)"):
        prepare_upload(str(out), "me/small", "mit")
