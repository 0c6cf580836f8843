"""The patterns of redaction.py: what a secret looks like.

Belongs here: data only, the columnar prefilter, the exact patterns and the table of card issuers. Does not belong here:
any function; what is done with a match is in redaction.py.
"""

from __future__ import annotations

import re
from typing import Final

# The columnar prefilter. One alternative a kind, without look-around and without boundaries, in the syntax that Polars
# and Python share; each is weaker than the exact pattern below, also over JSON text. A property test holds it there.

_SEPARATOR: Final = "[ \\-\u00a0\u2010\u2011\u2013]"
_KEY_PREFIXES: Final = (
    r"sk-|[rsp]k_(?:live|test)_|whsec_|gh[pousr]_|github_pat_|xox[a-z]-|xapp-|gl[a-z]{2,5}-|hf_|AIza|ya29\.|GOCSPX-|"
    r"npm_|loop_|pypi-|SG\.|dop_v1_|shp[a-z]{2}_|lin_api_|ntn_|gsk_|xai-|pplx-|r8_|dapi|key-|SK"
)
_CONFIDENTIAL: Final = r"(?i:secret|session.?token|security.?token|account.?key)"
#: One for each step of redaction.py, in its order.
SUSPECTS: Final = (
    r"PRIVATE KEY",
    r"eyJ[0-9A-Za-z_-]{8}",
    r"A[KS]IA[0-9A-Z]{16}",
    _CONFIDENTIAL,
    rf"(?:{_KEY_PREFIXES})[0-9A-Za-z._-]{{8}}|[0-9]{{8}}:[0-9A-Za-z_-]{{35}}",
    rf"{_CONFIDENTIAL}|(?i:bearer|basic)(?:\s|\\\w)+[0-9A-Za-z._~+/\\-]{{12}}"
    r"|(?i:api.?key|access.?key|(?:access|auth|refresh|bearer).?token)",
    r"[0-9A-Za-z_.+%'\u0080-\U0010ffff-]@[^\s]|%40|&#(?:64|[xX]40);",
    r"[0-9]{3}-[0-9]{2}-[0-9]{4}|(?i:ssn|social.security)",
    rf"[0-9](?:{_SEPARATOR}?[0-9]){{12}}",
    r"[0-9A-Fa-f]::|::[0-9A-Fa-f]|(?:[0-9A-Fa-f]{1,4}:){6}",
    r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]",
)
#: An escape of JSON text, behind which there may be any kind.
SUSPECT_ESCAPE: Final = r"\\u00[2-7][0-9A-Fa-f]"
SUSPECT: Final = "|".join((*SUSPECTS, SUSPECT_ESCAPE))
# The exact patterns. A secret may begin after a JSON escape that stands in the text as two or six characters. What can
# fail after an open repetition is bounded, so that hostile text takes linear time.

_LEFT: Final = r"(?:(?<![0-9A-Za-z])|(?<=\\[nrtbf])|(?<=\\u[0-9A-Fa-f]{4}))"
_RIGHT: Final = r"(?![0-9A-Za-z_-])"

PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [0-9A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[^-]{0,20000}(?:-(?!----END)[^-]{0,20000}){0,100}-----END [0-9A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"|(?:[0-9A-Za-z+/=\s]|\\[nr])*)"
)
JWT: Final = re.compile(rf"{_LEFT}eyJ[0-9A-Za-z_-]{{8,1000}}\.[0-9A-Za-z_-]{{8,}}(?:\.[0-9A-Za-z_-]*){{1,3}}")
AWS_ID: Final = re.compile(rf"{_LEFT}A[KS]IA[0-9A-Z]{{16}}(?![0-9A-Za-z])")
_GAP: Final = r"(?:[\s\"'\\`:=>,()\[\]*_-]|\bis\b|\bwas\b|\bare\b){1,16}"
AWS_SECRET: Final = re.compile(
    rf"(?i:secret[ _.-]?(?:access[ _.-]?)?key){_GAP}([0-9A-Za-z/+]{{40}})(?![0-9A-Za-z/+=])"
    rf"|(?i:session[ _-]?token|security[ _-]?token){_GAP}([0-9A-Za-z/+]{{60,}}=*)"
)
_VENDORS: Final = r"sk-(?:proj|ant|svcacct|admin|or|live|test)-"
VENDOR_KEY: Final = re.compile(_VENDORS)
BOT_KEY: Final = re.compile(r"[0-9]{8}:[0-9A-Za-z_-]{35}")
API_KEY: Final = re.compile(
    _LEFT
    + r"(?:"
    + r"|".join(
        (
            rf"{_VENDORS}[0-9A-Za-z_-]{{16,}}",
            r"sk-[0-9A-Za-z_-]{20,}",  # redaction.py leaves one that is words with hyphens
            r"[rsp]k_(?:live|test)_[0-9A-Za-z]{16,}",
            r"whsec_[0-9A-Za-z+/=]{20,}",
            r"gh[pousr]_[0-9A-Za-z]{20,}",
            r"github_pat_[0-9A-Za-z_]{20,}",
            r"xox[a-z]-[0-9A-Za-z-]{10,}",
            r"xapp-[0-9A-Za-z-]{20,}",
            r"gl(?:pat|ptt|dt|rt|cbt|ft|soat|agent|imt)-[0-9A-Za-z_.-]{16,}",
            r"hf_[0-9A-Za-z]{20,}",
            r"AIza[0-9A-Za-z_-]{30,}",
            r"ya29\.[0-9A-Za-z_-]{20,}",
            r"GOCSPX-[0-9A-Za-z_-]{20,}",
            r"npm_[0-9A-Za-z]{30,}",
            r"pypi-[0-9A-Za-z_-]{40,}",
            r"SG\.[0-9A-Za-z_-]{16,100}\.[0-9A-Za-z_-]{16,}",
            r"dop_v1_[0-9a-f]{40,}",
            r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{24,}",
            r"lin_api_[0-9A-Za-z]{20,}",
            r"ntn_[0-9A-Za-z]{30,}",
            r"gsk_[0-9A-Za-z]{30,}",
            r"xai-[0-9A-Za-z]{30,}",
            r"pplx-[0-9A-Za-z]{30,}",
            r"r8_[0-9A-Za-z]{30,}",
            r"dapi[0-9a-f]{32}",
            r"key-[0-9a-f]{32}",
            r"SK[0-9a-f]{32}",
            r"[0-9]{8,10}:[0-9A-Za-z_-]{35}",
            # This project's own (store/keys.py): 43 random signs, so one of them is a capital and one is none.
            r"loop_(?=[0-9a-z_-]{0,42}[A-Z])(?=[0-9A-Z_-]{0,42}[a-z])[0-9A-Za-z_-]{43,}",
        )
    )
    + rf"){_RIGHT}"
)
_MIXED: Final = r"(?=[0-9A-Za-z._~+/\\=-]{0,200}[0-9])(?=[0-9._~+/\\=-]{0,200}[A-Za-z])"
IN_CONTEXT: Final = re.compile(
    rf"(?i:\bbearer|\bauthorization[\s\"'\\:=]{{1,8}}basic)(?:\s|\\[nrt])+{_MIXED}([0-9A-Za-z._~+/\\-]{{16,}}=*)"
    r"|(?<!redacted:)(?i:api[ _-]?key|access[ _-]?token|auth[ _-]?token|refresh[ _-]?token|bearer[ _-]?token|"
    r"client[ _-]?secret|secret[ _-]?key|account[ _-]?key)"
    rf"[\"'\\]{{0,6}}\s*[:=]\s*[\"'\\]{{0,6}}{_MIXED}([0-9A-Za-z._~+/-]{{20,}}=*)"
)
EMAIL: Final = re.compile(
    r"(?<![\w.+%'-])([\w.+%'-]+)(?:@|%40|&#64;|&#[xX]40;)((?:[\w-]{1,63}\.)+(?:xn--[0-9a-z-]{2,}|[^\W\d_]{2,24}))(?!\w)"
)
#: Ends of file names that follow an @ in names of pictures and scripts; none is a top-level domain.
FILE_ENDS: Final = frozenset({"png", "jpg", "jpeg", "gif", "svg", "webp", "css", "js", "json", "html", "pdf", "txt"})
_UUID: Final = r"(?<![0-9A-Za-z])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![0-9A-Za-z])"
DIGITS: Final = re.compile(rf"{_UUID}|([0-9]+(?:{_SEPARATOR}[0-9]+)*)")
CARD_LIKE: Final = re.compile(rf"[0-9](?:{_SEPARATOR}?[0-9]){{12}}")
GROUP: Final = re.compile(r"[0-9]+")
SSN_LIKE: Final = re.compile(r"[0-9]-[0-9]{2}-[0-9]{4}")
SSN: Final = re.compile(
    rf"{_UUID}|(?<![0-9])(?<![0-9]-)([0-9]{{3}})-([0-9]{{2}})-([0-9]{{4}})(?![0-9])(?!-[0-9])"
    r"|(?<!redacted:)(?i:\bssn|\bsocial security(?: number| no\.?)?)(?:[\s\"'\\:=#.(-]|\bis\b){1,12}"
    r"([0-9]{3})[ -]?([0-9]{2})[ -]?([0-9]{4})(?![0-9])"
)
IPV6: Final = re.compile(r"(?<![0-9A-Fa-f:.])[0-9A-Fa-f:.]{3,}(?:%[0-9A-Za-z]{1,15})?")
IPV4: Final = re.compile(
    r"(?<![0-9])(?<![0-9]\.)([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})(?![0-9])(?!\.[0-9])"
)
_ALNUM: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: By pattern: what stands in or across every match that can be a secret, and every sign that any match can have.
NEAR: Final = {
    DIGITS: (CARD_LIKE, "0123456789ABCDEFabcdef -\u00a0\u2010\u2011\u2013"),
    IPV6: (re.compile(":"), f"{_ALNUM}:.%"),
    IPV4: (re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]"), "0123456789."),
}
VERSION_BEFORE: Final = re.compile(
    r"(?:(?<![A-Za-z])v|versions?)(?:\s+(?:is|was|number|no\.?))?[\s\"'\\`:=.#*_(\[-]{0,8}$", re.IGNORECASE
)
ESCAPE: Final = re.compile(r"\\+(?:u00([2-7][0-9A-Fa-f])|/)")

#: (prefix from, prefix to, lengths) of issuers, prefixes compared digit for digit.
ISSUERS: Final[tuple[tuple[str, str, range | tuple[int, ...]], ...]] = (
    ("4", "4", (13, 16, 18, 19)),
    ("51", "55", (16,)),
    ("2221", "2720", (16,)),
    ("2200", "2204", range(16, 20)),
    ("34", "34", (15,)),
    ("37", "37", (15,)),
    ("300", "305", range(14, 20)),
    ("36", "36", range(14, 20)),
    ("38", "39", range(14, 20)),
    ("35", "35", range(16, 20)),
    ("1800", "1800", (15,)),
    ("2131", "2131", (15,)),
    ("50", "50", range(13, 20)),
    ("56", "58", range(13, 20)),
    ("60", "69", range(16, 20)),
    ("63", "63", range(13, 20)),
    ("67", "67", range(13, 20)),
    ("81", "82", (16,)),
    ("9792", "9792", (16,)),
)
GROUPINGS: Final = (
    (4, 4, 4, 4, 3),
    (4, 4, 4, 4, 2),
    (4, 4, 4, 4),
    (4, 6, 5),
    (4, 6, 4),
    (8, 8),
    (6, 13),
    (4, 4, 4, 3),
    (4, 4, 4, 1),
)

#: Keys of a JSON object that are context for their value.
CONTEXT: Final = re.compile(r"version|^v$|ssn|social.?security|secret|token|key|authorization", re.IGNORECASE)
INTEGRAL: Final = re.compile(r"-?([0-9]{13,19})(?:\.0*)?|-?(?:[0-9]\.[0-9]{13,18}|[0-9]{13,19})0*[eE]\+?[0-9]{1,2}")
