"""Find access tokens, keys and passwords in texts before they are published, and mask them in records of commands.

Most secrets have a prefix that their issuer documents so that scanners can find them: RULES lists the prefix, what
follows it, and its name. The last rules find secrets by what stands beside them: an Azure connection string, a URL with
a password, `api_key = ..`.

A rule is tried only where its literal `word` occurs, which costs one search of the text in C; tokenizers have tens of
megabytes.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

MASK = b"***"


@dataclass(frozen=True)
class SecretRule:
    """A kind of secret.

    words: lower-case literals, one of which every match contains. pattern: its form, with the secret itself in the
    group `secret`. before: how many bytes of a match may stand before the word. guessed: whether the value must look
    random, because its form says little. is_prefix: whether the word is a token's own beginning.
    """

    kind: str
    words: tuple[bytes, ...]
    pattern: re.Pattern[bytes]
    before: int = 0
    guessed: bool = False
    is_prefix: bool = False


class Finding(NamedTuple):
    """A secret in a text. line: counted from 1. kind: what it seems to be."""

    line: int
    kind: str


def _by_prefix(kind: str, prefix: str, rest: str) -> SecretRule:
    """Return the rule of a token: a literal prefix behind no letter or digit, and the pattern of the rest."""
    pattern = rf"(?<![A-Za-z0-9]){re.escape(prefix)}(?P<secret>{rest})"
    return SecretRule(kind, (prefix.lower().encode(),), re.compile(pattern.encode()), is_prefix=True)


_WORD = "[A-Za-z0-9_-]"
_ALNUM = "[A-Za-z0-9]"
_HEX = "[0-9a-fA-F]"
# kind, prefix, what follows
_PREFIXES = [
    ("Hugging Face token", "hf_", f"{_ALNUM}{{30,}}"),
    ("Hugging Face organization token", "api_org_", f"{_ALNUM}{{30,}}"),
    *(("GitHub token", f"gh{kind}_", f"{_ALNUM}{{36,}}") for kind in "pousr"),
    ("GitHub token", "github_pat_", f"{_WORD}{{60,}}"),
    *(("GitLab token", f"gl{kind}-", r"[\w.=-]{20,}") for kind in ("pat", "ptt", "rt", "dt", "oas", "cbt", "soat", "agent", "ft", "imt", "wt", "ffct")),
    ("GitLab runner token", "GR1348941", f"{_WORD}{{20,}}"),
    ("Atlassian token", "ATATT3", r"[\w=-]{60,}"),
    ("Bitbucket token", "ATBB", f"{_ALNUM}{{28,}}"),
    ("AWS access key", "A3T", r"[A-Z0-9]{17}(?![A-Za-z0-9])"),
    *(("AWS access key", prefix, r"[A-Z0-9]{16}(?![A-Za-z0-9])") for prefix in ("AKIA", "ASIA", "ABIA", "ACCA")),
    ("Amazon Bedrock key", "ABSK", r"[A-Za-z0-9+/]{80,}"),
    ("Google API key", "AIza", rf"{_WORD}{{35}}(?!{_WORD})"),
    ("Google OAuth token", "ya29.", f"{_WORD}{{20,}}"),
    ("Google OAuth secret", "GOCSPX-", f"{_WORD}{{24,}}"),
    ("OpenAI or other API key", "sk-", r"(?=[\w-]*[0-9])[\w-]{32,}"),
    ("Slack token", "xox", r"[abceoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,}"),
    ("Slack token", "xapp-", r"\d-[A-Za-z0-9-]{20,}"),
    ("Slack token", "xwfp-", r"[A-Za-z0-9-]{20,}"),
    ("npm token", "npm_", f"{_ALNUM}{{36}}"),
    ("PyPI token", "pypi-", f"{_WORD}{{50,}}"),
    ("RubyGems token", "rubygems_", f"{_HEX}{{48}}"),
    ("crates.io token", "cio", f"{_ALNUM}{{32}}(?!{_ALNUM})"),
    ("Docker token", "dckr_pat_", f"{_WORD}{{27,}}"),
    ("Docker token", "dckr_oat_", f"{_WORD}{{27,}}"),
    *(("Stripe key", f"{kind}_{mode}_", f"{_ALNUM}{{10,}}") for kind in ("sk", "rk") for mode in ("live", "test", "prod")),
    ("Stripe webhook secret", "whsec_", r"[A-Za-z0-9+/=]{24,}"),
    ("SendGrid key", "SG.", rf"{_WORD}{{16,32}}\.{_WORD}{{16,64}}"),
    ("Twilio key", "SK", r"[0-9a-fA-F]{32}(?![A-Za-z0-9])"),
    ("Square token", "sq0atp-", f"{_WORD}{{22,}}"),
    ("Square secret", "sq0csp-", f"{_WORD}{{40,}}"),
    *(("Shopify token", f"shp{kind}_", f"{_HEX}{{32}}") for kind in ("at", "ca", "pa", "ss")),
    *(("DigitalOcean token", f"do{kind}_v1_", f"{_HEX}{{64}}") for kind in "opr"),
    ("Databricks token", "dapi", r"[0-9a-f]{32}(?:-\d)?(?![A-Za-z0-9])"),
    ("Weights & Biases key", "wandb_v1_", f"{_WORD}{{40,}}"),
    ("Replicate token", "r8_", f"{_ALNUM}{{37}}"),
    ("Groq key", "gsk_", f"{_ALNUM}{{48,}}"),
    ("Perplexity key", "pplx-", f"{_ALNUM}{{40,}}"),
    ("xAI key", "xai-", f"{_ALNUM}{{70,}}"),
    ("NVIDIA key", "nvapi-", f"{_WORD}{{60,}}"),
    ("Together key", "tgp_v1_", f"{_WORD}{{40,}}"),
    ("LangSmith key", "lsv2_", rf"(?:pt|sk)_{_HEX}{{32}}_{_HEX}{{10}}"),
    ("Pinecone key", "pcsk_", f"{_WORD}{{50,}}"),
    ("ElevenLabs key", "sk_", r"[0-9a-f]{48}(?![A-Za-z0-9])"),
    ("Kaggle token", "KGAT_", f"{_HEX}{{32}}"),
    *(("Vault token", f"hv{kind}.", f"{_WORD}{{24,}}") for kind in "sbr"),
    ("Grafana token", "glsa_", rf"{_ALNUM}{{32}}_{_HEX}{{8}}"),
    ("Grafana token", "glc_eyJ", r"[\w+/=-]{30,}"),
    ("New Relic key", "NRAK-", "[A-Z0-9]{27}"),
    ("Sentry token", "sntrys_eyJ", r"[\w+/=-]{30,}"),
    ("Sentry token", "sntryu_", f"{_HEX}{{64}}"),
    ("Linear key", "lin_api_", f"{_ALNUM}{{40}}"),
    ("Notion token", "ntn_", f"{_ALNUM}{{40,}}"),
    ("Notion token", "secret_", rf"{_ALNUM}{{43}}(?!{_WORD})"),
    ("Airtable token", "pat", rf"{_ALNUM}{{14}}\.[0-9a-f]{{64}}"),
    ("Figma token", "figd_", f"{_WORD}{{36,}}"),
    ("Postman key", "PMAK-", f"{_HEX}{{24}}-{_HEX}{{34}}"),
    ("Heroku key", "HRKU-", f"{_WORD}{{36,}}"),
    *(("Doppler token", f"dp.{kind}.", f"{_ALNUM}{{40,}}") for kind in ("pt", "st", "sa", "ct", "scim", "audit")),
    ("Pulumi token", "pul-", r"[0-9a-f]{40}(?![A-Za-z0-9])"),
    ("Supabase token", "sbp_", r"[0-9a-f]{40}(?![A-Za-z0-9])"),
    ("Supabase secret key", "sb_secret_", f"{_WORD}{{20,}}"),
    ("Netlify token", "nfp_", f"{_ALNUM}{{36}}"),
    ("Fly.io token", "fm1_", r"[\w+/=-]{40,}"),
    ("Fly.io token", "fm2_", r"[\w+/=-]{40,}"),
    *(("PlanetScale secret", f"pscale_{kind}_", r"[\w=.-]{32,}") for kind in ("tkn", "oauth", "pw")),
    ("Dropbox token", "sl.", rf"(?:u\.)?{_WORD}{{130,}}"),
    ("Artifactory key", "AKCp", f"{_ALNUM}{{65,}}"),
    ("Artifactory token", "cmVmd", f"{_ALNUM}{{59}}(?!{_ALNUM})"),
    ("Tailscale key", "tskey-", f"[a-z]+-{_WORD}{{16,}}"),
    ("1Password token", "ops_eyJ", r"[\w+/=-]{100,}"),
    ("age secret key", "AGE-SECRET-KEY-1", "[0-9A-Z]{58}"),
    ("Alibaba access key", "LTAI", r"[A-Za-z0-9]{16,24}(?![A-Za-z0-9])"),
    ("Amazon Bedrock key", "bedrock-api-key-YmVk", r"[A-Za-z0-9+/=]{16,}"),
    ("Cloudflare key", "v1.0-", rf"{_HEX}{{24}}-{_HEX}{{100,}}"),
    ("Clojars token", "CLOJARS_", r"[a-z0-9]{50,}"),
    ("Dynatrace token", "dt0c01.", r"[A-Za-z0-9]{24}\.[A-Za-z0-9]{64}"),
    ("Duffel token", "duffel_", r"(?:live|test)_[\w-]{40,}"),
    *(("EasyPost key", prefix, f"{_ALNUM}{{54}}") for prefix in ("EZAK", "EZTK")),
    *(("Facebook token", prefix, f"{_ALNUM}{{60,}}") for prefix in ("EAAM", "EAAC")),
    *(("Flutterwave key", f"FLWSECK{mode}", r"[A-Za-z0-9-]{12,}") for mode in ("-", "_TEST-")),
    ("Frame.io token", "fio-u-", f"{_WORD}{{60,}}"),
    ("Fly.io token", "fo1_", f"{_WORD}{{40,}}"),
    ("GitLab session", "_gitlab_session=", r"[0-9a-z]{32}"),
    ("Harness key", "pat.", rf"{_WORD}{{22}}\.[0-9a-fA-F]{{24}}\.{_ALNUM}{{20}}"),
    ("Infracost key", "ico-", r"[A-Za-z0-9]{32}(?![A-Za-z0-9])"),
    ("Mapbox secret token", "sk.eyJ", r"[\w-]{40,}\.[\w-]{16,}"),
    *(("New Relic key", prefix, r"[A-Za-z0-9-]{18,}") for prefix in ("NRII-", "NRJS-")),
    ("Octopus Deploy key", "API-", r"[A-Z0-9]{26}(?![A-Za-z0-9])"),
    ("OpenShift token", "sha256~", rf"{_WORD}{{43}}"),
    *(("Prefect key", prefix, f"{_ALNUM}{{36}}") for prefix in ("pnu_", "pnb_")),
    ("Readme key", "rdme_", r"[a-z0-9]{70}"),
    ("Scalingo token", "tk-us-", f"{_WORD}{{48}}"),
    ("Brevo key", "xkeysib-", rf"[0-9a-f]{{64}}-{_ALNUM}{{16}}"),
    *(("SettleMint token", f"sm_{kind}at_", f"{_ALNUM}{{16}}") for kind in "aps"),
    *(("Shippo token", f"shippo_{mode}_", f"{_HEX}{{40}}") for mode in ("live", "test")),
    *(("SonarQube token", f"sq{kind}_", r"[0-9a-f]{40}(?![A-Za-z0-9])") for kind in "upa"),
    ("Sourcegraph token", "sgp_", rf"(?:[0-9a-zA-Z]{{5,16}}_)?{_HEX}{{40}}"),
    ("Typeform token", "tfp_", r"[\w.=-]{59}"),
    ("Yandex key", "AQVN", f"{_WORD}{{35,38}}(?!{_WORD})"),
    ("JSON web token", "eyJ", rf"[\w-]{{8,}}\.eyJ{_WORD}{{8,}}\.{_WORD}{{8,}}"),
]  # fmt: skip

# Before _key or _token: what is no secret, in configs of tokenizers and in records of work.
_NO_SECRETS = (
    "(?:pad|bos|eos|unk|sep|cls|mask|image|video|audio|special|added|extra|next|last|first|stop|cache|sort|partition|primary|foreign|public|hash|state|dict|lookup"
    "|group|query|past|num|max|min|per|attention|head)"
)
_VALUE = r"""[^\s"'`<>{}()\[\],;\\&|]"""  # of a value without quotes around it
# Of a name and its value, in JSON, YAML, Python, TOML and shells
_BETWEEN = r"""["'`]{0,2}\s{0,3}(?::=|=>|[:=])\s{0,3}["'`]{0,2}"""


def _beside(kind: str, words: str, pattern: str, before: int = 0, guessed: bool = False) -> SecretRule:
    """Return a rule for what stands beside a word."""
    return SecretRule(kind, tuple(words.encode().split()), re.compile(pattern.encode()), before, guessed)


RULES: tuple[SecretRule, ...] = (
    *(_by_prefix(*entry) for entry in _PREFIXES),
    _beside("private key", "private", r"(?:-----BEGIN[ A-Z0-9_-]{0,40}|PuTTY-User-Key-File[^\0]{0,400}?)(?P<secret>P(?:RIVATE KEY|rivate-Lines))", 450),
    _beside("Slack webhook", "hooks.slack.com/", r"hooks\.slack\.com/(?:services|workflows|triggers)/(?P<secret>[\w+/-]{20,})"),
    _beside("Discord webhook", "/api/webhooks/", r"discord(?:app)?\.com/api/webhooks/\d{10,}/(?P<secret>[\w-]{40,})", 16),
    _beside("Microsoft Teams webhook", ".webhook.office.com/", r"webhook\.office\.com/webhookb2/(?P<secret>[\w@-]{36,}/IncomingWebhook/[\w/-]{32,})", 1),
    _beside("Telegram bot token", ":aa", r"(?<![A-Za-z0-9])\d{8,10}(?P<secret>:AA[\w-]{32,34})(?![\w-])", 11),
    _beside("Mailchimp key", "-us", r"(?<![A-Za-z0-9])(?P<secret>[0-9a-f]{32})-us\d{1,2}(?![A-Za-z0-9])", 33),
    _beside("Terraform token", ".atlasv1.", r"[A-Za-z0-9]{14}\.atlasv1\.(?P<secret>[\w=-]{60,})", 15),
    _beside("npm token", "_authtoken _auth _password", r"_(?:authToken|auth|password)\s{0,3}=\s{0,3}[\"']?(?P<secret>[\w+/=.-]{16,})"),
    _beside("Azure storage or service bus key", "accountkey sharedaccesskey accesskey", r"(?i)(?:Account|SharedAccess|Access)Key=(?P<secret>[A-Za-z0-9+/%]{40,}={0,2})"),
    _beside("Azure client secret", "q~", r"(?<![\w~.-])(?P<secret>[\w~.]{3}\dQ~[\w~.-]{31,34})(?![\w~.-])", 5),
    _beside("Azure API key", "jqqj99", r"(?P<secret>[A-Za-z0-9]{50,54}JQQJ99[A-Za-z0-9]{20,28})(?![A-Za-z0-9])", 54),
    _beside("Azure DevOps token", "azdo", r"(?<![A-Za-z0-9])(?P<secret>[A-Za-z0-9]{74,78}AZDO[A-Za-z0-9]{4})(?![A-Za-z0-9])", 78),
    _beside(
        "Azure key", "acdb apim +aba +amc +ast aiot azca +asb +aeh +arm azse +acr azfu",
        r"(?<![A-Za-z0-9+/])(?P<secret>[A-Za-z0-9+/]{76}(?:APIM|ACDb|\+(?:ABa|AMC|ASt))[A-Za-z0-9+/]{5}[AQgw]==|[A-Za-z0-9+/]{33}(?:AIoT|AzCa|\+(?:ASb|AEh|ARm))"
        r"[A-P][A-Za-z0-9+/]{5}=|[A-Za-z0-9]{42}(?:AzSe|\+ACR)[A-D][A-Za-z0-9+/]{5}|[A-Za-z0-9+/]{44}AzFu[A-Za-z0-9+/]{5}[AQgw]==)(?![A-Za-z0-9+/=])",
        76,
    ),
    _beside("Azure shared access signature", "sig=", r"[?&;](?:amp;)?sig=(?P<secret>[A-Za-z0-9%+/]{40,}(?:%3[Dd]|=)?)", 5),
    _beside("signed AWS URL", "x-amz-security-token=", r"(?i)X-Amz-Security-Token=(?P<secret>[A-Za-z0-9%/+=-]{16,})"),
    _beside("password in a URL", "://", r"""(?<=[A-Za-z0-9])://[^\s/:@"'<>`\\]{0,100}:(?P<secret>[^\s/@"'<>`\\]{1,200})@[A-Za-z0-9\[]"""),
    _beside("authorization header", "authorization", rf"""(?i)authorization{_BETWEEN}(?:basic|bearer|token|apikey)\s{{1,3}}(?P<secret>[A-Za-z0-9+/=._~-]{{16,}})"""),
    _beside("credentials of a command", "--", rf"""(?i)--?[a-z-]{{0,30}}(?:password|passwd|api-?key|token|secret)(?:["',\s=]{{1,6}})(?P<secret>{_VALUE}{{8,200}})(?!{_VALUE}|[(\[])""", 0, True),
    _beside("password", "passw passphrase", rf"(?i)pass(?:word|wd|phrase)[a-z_]{{0,12}}{_BETWEEN}(?P<secret>{_VALUE}{{8,200}})(?!{_VALUE}|[(\[])", 0, True),
    _beside(
        "key or token", "key token secret credential",
        rf"(?i)(?<![a-z0-9])(?!{_NO_SECRETS}[_ .-])(?:[a-z0-9]{{2,24}}[_.-]){{0,3}}(?:(?:api|access|auth|private|secret|shared|account|storage|session|signing|encryption|master"
        rf"|subscription|refresh|client)[ ]?(?:key|token|secret)|[a-z0-9]{{2,24}}[_.-](?:key|token|secret)|secret|credential)(?!s)[a-z_]{{0,12}}{_BETWEEN}"
        rf"(?P<secret>{_VALUE}{{16,400}})(?!{_VALUE}|[(\[])",
        60, True,
    ),
)  # fmt: skip

_MASKED = re.compile(rb"(?i)x{4,}|\*{2,}|\.{3}|redacted|your[_-]|^[{$%<]")  # written in place of a secret
_PLACEHOLDER = re.compile(
    rb"(?i)(?<![a-z])example|placeholder|change_?me|dummy"
)  # what documentation has beside a word like `password`
_REFERENCE = re.compile(  # a file or the name of a variable beside such a word
    rb"(?i)^(?:\.{0,2}/|~)[\w.-]+/|\.(?:pem|key|json|jsonl|txt|ya?ml|py|env|safetensors|bin|csv|md|html)$|environ|getenv|secrets\.|://"
)


def find_secrets(content: bytes) -> list[Finding]:
    """Return the secrets in a text, by line. Masked ones and placeholders are none."""
    text = _without_escapes(content)
    lowered, guessed_by_finding = text.lower(), dict[Finding, bool]()
    for rule in RULES:
        for at in _places(rule, text, lowered):
            guessed_by_finding[Finding(text.count(b"\n", 0, at) + 1, rule.kind)] = rule.guessed
    precise = {finding.line for finding, guessed in guessed_by_finding.items() if not guessed}
    return sorted(
        finding for finding, guessed in guessed_by_finding.items() if not (guessed and finding.line in precise)
    )


def mask_secrets(text: str) -> str:
    """Return the text with *** in place of every secret."""
    content = text.encode("utf-8", "surrogatepass")
    for rule in RULES:
        if any(word in content.lower() for word in rule.words):
            content = rule.pattern.sub(partial(_mask, rule), content)
    return content.decode("utf-8", "surrogatepass")


def _mask(rule: SecretRule, match: re.Match[bytes]) -> bytes:
    """Return a match with its secret masked.

    Of a token nothing is left, the prefix included, and one that is a placeholder is masked too.
    """
    if not rule.is_prefix and not _is_secret(match["secret"], rule):
        return match[0]
    start, end = (position - match.start() for position in match.span("secret"))
    return MASK if rule.is_prefix else match[0][:start] + MASK + match[0][end:]


def _places(rule: SecretRule, text: bytes, lowered: bytes) -> Iterator[int]:
    """Yield the positions of a rule's secrets.

    The pattern is tried from `before` bytes before each of the rule's words on.
    """
    for word in rule.words:
        at = lowered.find(word)
        while at >= 0:
            starts = range(max(0, at - rule.before), at + 1)
            match = next(filter(None, (rule.pattern.match(text, start) for start in starts)), None)
            if match is not None and _is_secret(match["secret"], rule):
                yield match.start("secret")
            at = lowered.find(word, at + 1 if match is None else max(at + 1, match.end()))


def _is_secret(value: bytes, rule: SecretRule) -> bool:
    if _MASKED.search(value):
        return False
    if rule.is_prefix and len(set(value)) < 5:
        return False
    return not rule.guessed or _is_random(value)


def _is_random(value: bytes) -> bool:
    """Return whether a value beside a word like `password` looks like a secret: letters and digits mixed, no path,
    variable or plain word.
    """
    if any(pattern.search(value) for pattern in (_MASKED, _PLACEHOLDER, _REFERENCE)):
        return False
    digits, letters = (sum(test(chr(byte)) for byte in value) for test in (str.isdigit, str.isalpha))
    least = 2.5 if len(value) < 16 else 3.2  # bits per byte; names of classes and layers have about 3
    return digits >= 2 and letters >= 2 and _entropy(value) >= least


def _entropy(value: bytes) -> float:
    """Return the Shannon entropy of the bytes, in bits per byte."""
    return -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())


def _without_escapes(content: bytes) -> bytes:
    """Return a text without the escapes of JSON and HTML, with the same lines: a secret behind \\n or &quot; begins a
    word.
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        content = content.decode("utf-16", "replace").encode("utf-8", "replace")
    if b"\\" in content:
        for escaped, plain in (
            (b"\\/", b"/"),
            (b'\\"', b'"'),
            (b"\\n", b" "),
            (b"\\t", b" "),
            (b"\\r", b" "),
            (b"\\u0026", b"&"),
        ):
            content = content.replace(escaped, plain)
    if b"&quot;" in content or b"&#x27;" in content or b"&amp;" in content:
        content = html.unescape(content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    return content
