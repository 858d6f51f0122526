"""The tokenizer of a model directory, hub id or GGUF file, as plain text and numbers: what the data path and `final/` need.

The ids are those of the model's own tokenizer.json. Where transformers would rebuild the pipeline from vocabulary and
merges (its Llama and Gemma classes do), the file is right and the rebuilt one can lose leading spaces.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.config.model import ModelConfig
from rft.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_KEPT_KEYS = (
    "model_max_length",
    "padding_side",
    "truncation_side",
    "clean_up_tokenization_spaces",
    "model_input_names",
)
"""tokenizer_config.json keys that do not change ids and stay."""
_HUB_PATTERNS = [
    "*token*",
    "*.jinja",
    "chat_template.json",
    "config.json",
    "*.model",
    "vocab*",
    "merges.txt",
    "tekken.json",
]
"""What a hub id's tokenizer consists of; no weights."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as text: everything that decides ids is in `json`."""

    json: str
    """Text of tokenizer.json, padding and truncation off, `model.add_tokens` in it."""
    template: str | None
    """The model's own chat template (jinja), or None."""
    special: dict[str, str]
    """What templates see: {"bos_token": ..., "eos_token": ..., ...}."""
    eos_id: int
    bos_id: int | None
    pad_id: int
    """The pad token's id; the end token's where there is none. Labels never depend on it."""
    add_bos: bool
    """Whether the tokenizer puts the begin-of-text token before plain text (not before a rendered template)."""
    vocab_size: int
    """Largest id + 1, added tokens included."""
    hf_kwargs: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json keys that do not change ids."""
    added_ids: tuple[int, ...] = ()
    """Ids that `model.add_tokens` made: their embedding rows are new."""
    source: str = ""
    """Where it came from, for messages."""
    unicode: int = 16
    """Version of the Unicode tables that split patterns read (`model.unicode`)."""

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.json)

    def token_id(self, text: str) -> int | None:
        """Id of a token, or None."""
        return self._backend.token_to_id(text)

    def control_tokens(self) -> list[str]:
        """Every added token that is special: text that means structure, not words."""
        return [t.content for _, t in sorted(self._backend.get_added_tokens_decoder().items()) if t.special]

    def hf(self, template: str | None = None) -> PreTrainedTokenizerFast:
        """The same tokenizer as a transformers object, with `template` (default: the model's own)."""
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        template = self.template if template is None else template
        backend = Tokenizer.from_str(self.json)  # transformers changes the object that it is given
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            **self.special,
            **self.hf_kwargs,
            **({"chat_template": template} if template else {}),
        )

    def save(self, directory: str | Path, template: str | None = None) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja so that AutoTokenizer gives the same ids.

        template: the one that was trained with; None leaves out the file.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # A class name of transformers' own (LlamaTokenizer, ...) would have it rebuild the pipeline instead of reading it.
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.hf_kwargs, **self.special}
        (directory / "tokenizer.json").write_text(self.json, "utf-8")
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config, ensure_ascii=False, indent=2) + "\n", "utf-8"
        )
        if template is not None:
            (directory / "chat_template.jinja").write_text(template, "utf-8")


def load_tokenizer(model: ModelConfig) -> TokenizerFiles:
    """The tokenizer of `model.path`, with `model.add_tokens` added and `model.unicode`.

    Raises ModelError where there is none, it has no fast form, or it names no end token.
    """
    path = Path(model.path)
    files = _from_gguf(path) if path.is_file() else _from_folder(model)
    files = replace(files, unicode=model.unicode)
    return _with_added(files, model.add_tokens) if model.add_tokens else files


def _from_gguf(path: Path) -> TokenizerFiles:
    from rft.models.tokenizer_gguf import read_metadata, tokenizer_from_metadata

    tokenizer, config = tokenizer_from_metadata(read_metadata(path), str(path))
    return _finish(tokenizer, config, config.get("chat_template"), str(path))


def _from_folder(model: ModelConfig) -> TokenizerFiles:
    from tokenizers import Tokenizer

    find = ModelFiles(model)
    config = find.json("tokenizer_config.json")
    config = {**{k: v for k, v in find.json("special_tokens_map.json").items() if k in _SPECIAL}, **config}
    text = find.text("tokenizer.json")
    if text is None:
        tokenizer = _converted(model, find, config)
    else:
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(find.where("tokenizer.json"), f"cannot be read: {error}") from None
    if "eos_token" not in config:
        config.update(_eos_of_model(find, tokenizer))
    return _finish(tokenizer, config, _template(find, config), model.path)


class ModelFiles:
    """Files of a model's directory, or of a hub id's without its weights, by name."""

    def __init__(self, model: ModelConfig):
        self.directory = Path(model.path) if Path(model.path).is_dir() else _hub_directory(model)

    def where(self, name: str) -> str:
        return str(self.directory / name)

    def text(self, name: str) -> str | None:
        path = self.directory / name
        if not path.is_file():
            return None
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(self.where(name), f"cannot be read: {error}") from None

    def json(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        try:
            value = {} if text is None else json.loads(text)
        except ValueError as error:
            raise ModelError(self.where(name), f"not JSON: {error}") from None
        return value if isinstance(value, dict) else {}


def _hub_directory(model: ModelConfig) -> Path:
    """Directory of a hub id's tokenizer files: the local cache first, so that no network is needed once they are there."""
    from huggingface_hub import snapshot_download

    def fetch(local: bool) -> Path:
        path = snapshot_download(
            model.path, revision=model.revision, local_files_only=local, allow_patterns=_HUB_PATTERNS
        )
        return Path(path)

    where = f"model.path = {model.path!r}"
    with contextlib.suppress(Exception):  # not cached, or no hub id at all: the second call says which
        found = fetch(local=True)
        if (found / "tokenizer_config.json").is_file() or (found / "tokenizer.json").is_file():
            return found
    try:
        return fetch(local=False)
    except Exception as error:  # the hub client raises many kinds (offline, gated, not found): each ends the run here
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            where,
            f"no directory, no GGUF file, and the hub gives no tokenizer: {lines[0][:200]}",
            do="check model.path, or download the model and give its directory",
        ) from None


TOKENIZER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
    "tiktoken.model",
)
"""Those from which transformers may make a fast tokenizer where there is no tokenizer.json."""


def _converted(model: ModelConfig, find: ModelFiles, config: dict[str, Any]) -> Any:
    """The fast form of a tokenizer that has no tokenizer.json (SentencePiece or vocab + merges), by transformers."""
    from transformers import AutoTokenizer

    if not any((Path(find.directory) / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            str(find.directory),
            "holds no tokenizer",
            wanted="tokenizer.json, tokenizer.model, or vocab.json and merges.txt",
            do="copy the tokenizer's files there from where the model came from",
        )
    try:
        loaded = AutoTokenizer.from_pretrained(find.directory, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        raise ModelError(
            model.path,
            f"no tokenizer.json, and transformers cannot make one: {str(error).splitlines()[0]}",
            do="install the package that the message names (often sentencepiece), or add a tokenizer.json",
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            model.path,
            f"its tokenizer ({type(loaded).__name__}) has no fast form",
            wanted="a tokenizer.json that the tokenizers library reads",
        )
    for name in _SPECIAL:
        if getattr(loaded, name, None) is not None:
            config.setdefault(name, str(getattr(loaded, name)))
    return backend


def _eos_of_model(find: ModelFiles, tokenizer: Any) -> dict[str, Any]:
    """The end token that config.json names by id, for tokenizers that name none."""
    value = find.json("config.json").get("eos_token_id")
    first = value[0] if isinstance(value, list) and value else value
    token = tokenizer.id_to_token(first) if isinstance(first, int) else None
    return {"eos_token": token} if token is not None else {}


def _template(find: ModelFiles, config: dict[str, Any]) -> str | None:
    """The default chat template: a file of its own comes before a key of the config, as in transformers."""
    found: Any = find.text("chat_template.jinja")
    if found is None:
        found = config.get("chat_template")
    if found is None:
        found = find.json("chat_template.json").get("chat_template")
    if isinstance(found, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) and found else None


def _content(value: Any) -> str | None:
    """Text of a special token, which configs write as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _finish(tokenizer: Any, config: dict[str, Any], template: str | None, source: str) -> TokenizerFiles:
    from tokenizers import AddedToken

    tokenizer.no_padding()
    tokenizer.no_truncation()
    _add_listed(tokenizer, config.get("added_tokens_decoder"))
    special = {name: text for name in _SPECIAL if (text := _content(config.get(name))) is not None}
    special = {name: text for name, text in special.items() if tokenizer.token_to_id(text) is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [text for value in (extra.values() if isinstance(extra, dict) else extra) if (text := _content(value))]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    # Named as special but an ordinary entry in the file: transformers marks them so as well.
    wanted = [t for t in [*special.values(), *named] if t not in known and tokenizer.token_to_id(t) is not None]
    if wanted:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in wanted])
    if "eos_token" not in special:
        raise ModelError(
            source,
            "the tokenizer names no end token (eos_token)"
            if not config.get("eos_token")
            else f"the end token {_content(config['eos_token'])!r} is not in the vocabulary",
            do='set "eos_token" in tokenizer_config.json',
        )
    bos_id = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    eos_id = tokenizer.token_to_id(special["eos_token"])
    pad_id = tokenizer.token_to_id(special["pad_token"]) if "pad_token" in special else eos_id
    return TokenizerFiles(
        json=tokenizer.to_str(),
        template=template,
        special=special,
        eos_id=eos_id,
        bos_id=bos_id,
        pad_id=pad_id,
        # The post-processor in the file decides, as in transformers; config keys such as add_bos_token do not.
        add_bos=bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id],
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        hf_kwargs={key: config[key] for key in _KEPT_KEYS if key in config},
        source=source,
    )


def _add_listed(tokenizer: Any, listed: Any) -> None:
    """Tokens that tokenizer_config.json lists by id and the file lacks, in order of their ids."""
    from tokenizers import AddedToken

    if not isinstance(listed, dict):
        return
    for index, entry in sorted((int(key), value) for key, value in listed.items()):
        text = _content(entry)
        if text is None or tokenizer.token_to_id(text) is not None or index != tokenizer.get_vocab_size():
            continue
        flags = {flag: entry.get(flag, False) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        token = AddedToken(text, **flags)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])


def _with_added(files: TokenizerFiles, texts: list[str]) -> TokenizerFiles:
    """`files` with new tokens after the old ones. `<|...|>` becomes a control token, anything else an ordinary entry."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(files.json)
    made: list[int] = []
    for text in texts:
        if not text.strip():
            raise ModelError("model.add_tokens", f"{text!r} is not a token", wanted="text that is not only spaces")
        if tokenizer.token_to_id(text) is not None:
            continue  # already there: its row has been trained, so it is not new
        control = text.startswith("<|") and text.endswith("|>")
        token = AddedToken(text, special=control, normalized=False)
        (tokenizer.add_special_tokens if control else tokenizer.add_tokens)([token])
        index = tokenizer.token_to_id(text)
        assert index is not None
        made.append(index)
    return replace(
        files,
        json=tokenizer.to_str(),
        vocab_size=max(files.vocab_size, *(index + 1 for index in made)) if made else files.vocab_size,
        added_ids=tuple(made),
    )
