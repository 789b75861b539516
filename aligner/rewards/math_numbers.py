"""Numbers and formulas as people write them, as math-verify's input: thousands separators, units, remarks, signs."""

from __future__ import annotations

import re
from decimal import Decimal

LONGEST = 500  # characters of an answer; a longer one is a text
NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3}\b)?"
# Words after a number that make it another number. Any other word there is taken for its unit.
_CHANGES = """and or not to by times over plus minus divided mod modulo squared cubed pi sqrt hundred hundreds thousand
thousands million millions billion billions trillion trillions dozen dozens half halves third thirds
quarter quarters fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth
thousandths base sin cos tan cot sec csc log ln exp max arcsin arccos arctan"""
_UNITS = "kg cm mm km ml cl dl lb lbs oz mph kwh"  # that may follow without a blank; `2xy` is a product
_SHORT = "m g s h l L V W A N J ft in yd mi hr am pm sq"  # that may follow a blank; another letter is a variable
_SPELLED = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
CHANGES, UNITS, SHORT = set(_CHANGES.split()), set(_UNITS.split()), set(_SHORT.split())
SPELLED = {word: value for value, word in enumerate(_SPELLED.split())}
SPELLED |= {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9}

SIGNS = str.maketrans(
    {"−": "-", "（": "(", "）": ")", "，": ", ", "：": ": ", "。": ". ", "×": r" \times ", "·": r" \cdot "}
    | {"÷": "/", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "±": r"\pm "}
    | {"∪": r" \cup ", "∈": r" \in ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}"}
    | {"¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "⟨": "(", "⟩": ")", "〈": "(", "〉": ")"}
    | dict.fromkeys("\u00a0\u2009\u202f", " ")
)
_TEXT_NUMBER = re.compile(rf"\\(?:text|textbf|mbox|mathrm|mathbf)\{{\s*({NUMBER}|\d{{1,3}}(?:,\d{{3}})+)\s*\}}")
_TEXT_WORDS = re.compile(r"\\(?:text|textbf|mbox|mathrm|mathbf)\{([a-zA-Z\s-]{3,60})\}")
_NAMED = {"langle": "(", "rangle": ")", "lparen": "(", "rparen": ")", "lbrack": "[", "rbrack": "]"}
_BRACKET = re.compile(rf"\\({'|'.join(_NAMED)})(?![a-zA-Z])\s?")
_REPEATING = re.compile(r"(?<![\d.])(\d{1,20})\.(\d{0,20})\\(?:overline|bar)\s*(?:\{(\d{1,20})\}|(\d))")
_DEGREES = re.compile(r"(\^\s*\{?\s*\\circ\s*\}?)\s*[CF](?!\w)")
_INFINITY = re.compile(r"(?<![\\\w])(?:infinity|inf)(?!\w)", re.IGNORECASE)
_POWER = re.compile(r"\^\s*(-\d+)")  # LaTeX takes the sign alone
_TIMES = re.compile(r"(?<=\d)\s*x\s*(?=10\s*\^)")  # of 3 x 10^8
_UNIT = r"\s*[^\W\d_](?:[^\W\d_]|[\s/.²³-]|\^[23])*"
_AMOUNT = re.compile(
    rf"[*_`]*(?P<sign>-?)\s*[$€£¥]?\s*(?P<number>{NUMBER})\$?[*_`]*(?:\s*(?P<percent>\\?%|percent)|\s+(?P<scale>(?i:thousand|million|billion))(?![^\W\d_]))?"
    rf"(?:\s*[$€£¥°]|(?P<unit>{_UNIT}))?[*_`.]*"
)
_REMARK = re.compile(
    r"(?P<number>[^()]*\d[^()]*?)\s+\((?P<words>(?=[^()]*[^\W\d_]{3})[^\W\d_]{2,}(?:[\s,.'-]+[^\W\d_]+)*\.?)\)[*_`.]*"
)
_MARKUP = re.compile(r"[*_`]{1,3}(.+?)[*_`]{1,3}\.?")
_DOLLARS = re.compile(rf"[*_`]*(?:\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\])[*_`]*(?P<unit>{_UNIT})?[*_`.]*")
_DELIMITERS = re.compile(r"\$|(?<!\\)\\[()\[\]]")
_THIN = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|\\ |~)(?=\d{3}(?!\d))")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_EUROPEAN = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+),(\d+)(?![\d.,])")
_GROUPED = re.compile(r"(?<![\d.,\w\\^])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_SPACED = re.compile(r"(?<![\d.,\w\\^}])[1-9]\d{0,2}(?: \d{3})+(?![\d,])")
_MIXED = re.compile(r"(-?\d+)\s+(\d+)/(\d+)")
_BESIDE = re.compile(r"(?<![\w^\\}])[\d.,]*\d\s+[\d.]")  # two numbers and only a blank between them
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*\d\s+\d")
_EXPONENT = re.compile(r"(?<![\w.\\])\d+(?:\.\d*)?[eE][+-]?\d{1,3}(?![\w.])")
_ARGUMENT = re.compile(r"[\w}\])^]")  # before a brace that opens a command's argument


def plain(text: str) -> str:
    r"""Return a text with one way to write signs, brackets, repeating decimals, degrees and infinity.

    Signs become ASCII or LaTeX commands. Escaped dollars (a currency) and \text around a number are removed.
    """
    text = re.sub(r"(?<!\\)\\\$", "", text.translate(SIGNS))
    text = _TEXT_NUMBER.sub(lambda number: number[1].replace(",", ""), text)
    text = _TEXT_WORDS.sub(lambda words: words[0] if (value := spelled(words[1])) is None else str(value), text)
    text = _BRACKET.sub(lambda bracket: _NAMED[bracket[1]], _REPEATING.sub(_fraction, text))
    text = _POWER.sub(r"^{\1}", text)
    return _TIMES.sub(r" \\times ", _INFINITY.sub(r"\\infty ", _DEGREES.sub(r"\1", text)))


def _fraction(decimal: re.Match) -> str:
    r"""Return the fraction of a repeating decimal: 0.1\overline{6} is 15/90."""
    whole, first, again = decimal[1], decimal[2], decimal[3] or decimal[4]
    below = int("9" * len(again) + "0" * len(first))
    return rf"\frac{{{int(whole + first + again) - int(whole + first)}}}{{{below}}}"


def is_unit(text: str) -> bool:
    """Return whether the text behind a number names a unit that does not change the number."""
    first, *others = re.findall(r"[^\W\d_]+", text)
    known = first.lower() in UNITS or (text[0].isspace() and (len(first) > 2 or first in SHORT))
    return known and not CHANGES.intersection(word.lower() for word in (first, *others))


def spelled(text: str) -> int | None:
    """Return the whole number that `text` is in English words, up to billions, or None."""
    words = [word for word in re.split(r"[\s,-]+", text.lower().strip(" .")) if word]
    if not words or words[-1] == "and":
        return None
    total, below = 0, -1  # below: value below the next `LARGE` word; -1: nothing yet
    for index, word in enumerate(words):
        if word in SPELLED:
            value = SPELLED[word]
            if below >= 0 and not (below % 100 == 0 < below or (below % 100 >= 20 and below % 10 == 0 and value < 10)):
                return None
            below = max(below, 0) + value
        elif word == "hundred" and 0 < below < 100:
            below *= 100
        elif word in LARGE and below > 0:
            total, below = total + below * LARGE[word], -1
        elif word == "a" and index == 0 and words[1:2] and (words[1] == "hundred" or words[1] in LARGE):
            below = 1
        elif word != "and" or index == 0:
            return None
    return total + max(below, 0)


def amount(text: str) -> str:
    """Return the number of `**$42 dollars** (forty-two)`, with its `%`; else the text itself."""
    text = text.strip()
    if len(text) > LONGEST:
        return text
    bare = _without_remark(text)
    value = spelled(bare)
    if value is not None:
        return str(value)
    number = _AMOUNT.fullmatch(ungrouped(bare))
    if number is None or (number["unit"] and not is_unit(number["unit"])):
        return text
    digits = number["sign"] + number["number"].lstrip("+")
    if number["scale"]:
        digits = format(Decimal(digits) * LARGE[number["scale"].lower()], "f")
    return _without_exponents(digits) + ("%" if number["percent"] else "")


def _without_exponents(text: str) -> str:
    """Write exponents out, because math-verify reads the e of 1e-5 as Euler's number."""
    return _EXPONENT.sub(lambda number: format(Decimal(number[0]), "f"), text)


def _without_remark(text: str) -> str:
    """Remove the words in brackets behind a number, unless they name another number."""
    remark = _REMARK.fullmatch(text)
    if remark is None:
        return text
    value = spelled(remark["words"])
    if value is None:
        changed = CHANGES.intersection(remark["words"].lower().split())
        return text if changed else remark["number"]
    return remark["number"] if amount(remark["number"]).rstrip("%") == str(value) else text


def ungrouped(text: str) -> str:
    """Remove thousands separators. A comma within brackets always separates two numbers."""
    text = _DECIMAL_COMMA.sub(".", _THIN.sub("", text))
    text = _EUROPEAN.sub(lambda number: number[1].replace(".", "") + "." + number[2], text)
    pieces, since = [], 0
    open_: list[bool] = []  # whether each open bracket is one of a list; braces of a LaTeX command are not
    for index, char in enumerate(text):
        if char in "([{)]}":
            pieces.append(_separated(text[since:index], any(open_)))
            since = index
            if char in "([{":
                open_.append(char != "{" or not _ARGUMENT.match(text[max(0, index - 1) : index]))
            elif open_:
                open_.pop()
    return "".join((*pieces, _separated(text[since:], any(open_))))


def _separated(text: str, in_list: bool) -> str:
    if in_list:
        return re.sub(r"(?<=\d),(?=\d)", ", ", text)
    text = _GROUPED.sub(lambda number: number[0].replace(",", ""), text)
    return _SPACED.sub(lambda number: number[0].replace(" ", ""), text)


def listed(text: str) -> str:
    """Return `1,234` as two numbers: if the reference is a list, its answer may be one without blanks."""
    return re.sub(r"(?<=\d),(?=\d)", ", ", text)


def formula(text: str) -> str:
    """Return a stated answer as one LaTeX formula without delimiters, so that no second answer is lost.

    Empty if it is two numbers side by side, which LaTeX would multiply.
    """
    text = text.strip()
    if len(text) <= LONGEST:
        emphasised = _MARKUP.fullmatch(text)
        text = emphasised[1] if emphasised and not re.search(r"[*_`]{2}|[*`]", emphasised[1]) else text
        inside = _DOLLARS.fullmatch(text)
        if inside and (not inside["unit"] or is_unit(inside["unit"])):
            text = inside[1] or inside[2] or inside[3]
    text = _DELIMITERS.sub(" ", amount(text)).strip()
    text = amount(text)
    mixed = _MIXED.fullmatch(text)
    if mixed:
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    text = _without_exponents(ungrouped(text))
    return "" if _BESIDE.search(_SHORT_FRACTION.sub("", text)) else text


def brackets(text: str) -> str:
    """Return `{` if a whole formula is a set, `(` if it is a pair, an interval or a list of them, else nothing."""
    text = text.replace("\\left", "").replace("\\right", "").replace(" ", "")
    if text.startswith(("\\{", "{")) and text.endswith("}"):
        return "{"
    return "(" if text.startswith(("(", "[")) and text.endswith((")", "]")) and "," in text else ""
