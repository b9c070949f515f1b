"""Text in and out: the bundle's tokenizer, its chat template in a sandbox, and text that grows token by token."""

import datetime
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from dspark.errors import UsageError
from dspark.reading import read_object
from dspark.runtime.bundle import Bundle

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


class Tokenizer:
    """tokenizer.json through the `tokenizers` library, with the special tokens and template that lie beside it."""

    def __init__(self, folder: Path):
        """UsageError when a file cannot be read."""
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"{folder / TOKENIZER}: not a tokenizer ({error}); export the bundle again") from error
        # A file saved after training may still cut or pad to its training length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_config(folder / CONFIG)
        self._template = _read_template(folder / TEMPLATE, self._config)
        self.where = str(folder)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; UsageError for what is no Unicode text, such as half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"prompt: character {error.start} is no Unicode text; give valid UTF-8") from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[dict], *, add_generation_prompt: bool = True) -> str:
        """Messages [{"role", "content"}] through the model's chat template; UsageError if it has none or refuses."""
        if self._template is None:
            raise UsageError(f"{self.where}: the model has no chat template; leave the chat option out")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {name: token for name in names if (token := _special(self._config.get(name))) is not None}
        try:
            template = _environment().from_string(self._template)
            asked = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
            return template.render(**asked, tools=None, documents=None, **special)
        except Exception as error:  # a template is a program: besides Jinja's errors it can raise anything
            raise UsageError(f"{self.where}: the chat template refuses these messages: {error}") from error

    def encode_chat(self, messages: Sequence[dict]) -> list[int]:
        """Tokens of the rendered messages, ready for the assistant's answer. The template writes the special tokens."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


class Detokenizer:
    """Text of a growing token list, in pieces that never end inside a character.

    A token can hold part of a character, and a tokenizer may spell a token differently at the beginning of a text. So
    each piece is the difference of two decodings that start at the same earlier token.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # where both decodings begin
        self._shown = 0  # tokens whose text is out
        self._more = 0  # characters after them that are out too: a part of a character follows those

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Add tokens; return the text that became certain. last=True gives out what was held back."""
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        after = self._tokenizer.decode(self._ids[self._start :])
        certain = after if last else after.rstrip("\N{REPLACEMENT CHARACTER}")
        text = certain[len(before) + self._more :]
        if certain == after:
            self._start, self._shown, self._more = self._shown, len(self._ids), 0
        else:
            self._more += len(text)
        return text


class Ending:
    """Where an answer ends, and which of its text may be shown: never a part of a stop string or of a character."""

    def __init__(self, stop_ids: Collection[int], strings: Sequence[str], text: Detokenizer | None):
        """text: of the answer, from its beginning; None: there is no text, and no stop string can be found."""
        self.stopped = False  # by the last token pushed
        self._ids, self._strings, self._text = stop_ids, strings, text
        self._held = ""  # text that was not shown yet

    def push(self, token: int) -> bool:
        """Add a token that is kept; True: the answer ends with it."""
        if self._text is not None:
            self._held += self._text.push([token])
        self.stopped = token in self._ids or self._cut()
        return self.stopped

    def take(self, *, last: bool = False) -> str:
        """The text that became certain. last=True gives out what was held back: the answer has ended."""
        if last and self._text is not None and not self._cut():
            self._held += self._text.push([], last=True)
            self._cut()
        keep = 0 if last else max((_overlap(self._held, string) for string in self._strings), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _cut(self) -> bool:
        """Drop everything from the first stop string on, if there is one."""
        found = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        if found:
            self._held, self._text = self._held[: min(found)], None
        return bool(found)


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of `text` may be the beginning of `string`."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if string.startswith(text[-n:])), 0)


def load_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """The bundle's tokenizer, or None for a bundle without one: it then works on token ids only."""
    return Tokenizer(bundle.folder) if bundle.has(TOKENIZER) else None


def _read_config(file: Path) -> dict:
    return read_object(file, "export the bundle again", constants=True) if file.exists() else {}


def _read_template(file: Path, config: dict) -> str | None:
    """The template of its own file, else of the config: a string, or named ones of which `default` counts."""
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special(token: object) -> str | None:
    """A special token is spelled as a string or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _environment():
    """Jinja as Hugging Face sets it up for chat templates: sandboxed, immutable, with their usual helpers."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Generation(Extension):
        """{% generation %} marks the assistant's part for trainers; here it is only its content."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions = ["jinja2.ext.loopcontrols", Generation]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env
