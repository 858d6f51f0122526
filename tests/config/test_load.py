"""TOML and --set to Config: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.config.load import load_config, parse_value
from rft.config.root import Config
from rft.errors import ConfigError

MINIMAL = '[model]\npath = "org/model"\n[[data.train]]\npath = "rows.jsonl"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a data file, away from the current one."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "rows.jsonl").write_text("{}\n")
    (elsewhere / "other.jsonl").write_text("{}\n")
    monkeypatch.chdir(elsewhere)
    return home


def load(folder: Path, text: str = MINIMAL, *sets: str) -> Config:
    (folder / "chat.toml").write_text(text)
    return load_config(folder / "chat.toml", sets)


def refusal(folder: Path, text: str = MINIMAL, *sets: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *sets)
    return caught.value


# ---- what a short file becomes


def test_two_lines_are_a_config_and_everything_else_has_its_default(folder):
    config = load(folder)
    assert config.adapter.name == "lora"
    assert config.optim.lr == "auto"
    assert config.train.epochs == 1.0


def test_the_run_directory_is_named_after_the_file_and_lies_beside_it(folder):
    assert load(folder).train.out == str(folder / "runs" / "chat")


def test_a_file_with_a_byte_order_mark_and_crlf_is_the_same_config(folder):
    (folder / "chat.toml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(folder / "chat.toml") == load(folder)


def test_a_dict_is_the_same_config_and_stays_as_it_was(folder, monkeypatch):
    monkeypatch.chdir(folder)
    given = {"model": {"path": "org/model"}, "data": {"train": [{"path": Path("rows.jsonl")}]}}
    config = load_config(given, ["optim.lr=1e-4"])
    assert config.data.train[0].path == str(folder / "rows.jsonl")
    assert config.optim.lr == 1e-4
    assert given == {"model": {"path": "org/model"}, "data": {"train": [{"path": Path("rows.jsonl")}]}}


def test_rows_from_python_stand_in_for_the_training_path(folder):
    config = load_config({"model": {"path": "org/model"}}, rows=True)
    assert len(config.data.train) == 1


# ---- numbers, as they are written (BO-45)


@pytest.mark.parametrize(
    ("line", "value"),
    [("lr = 2e-5", 2e-5), ("lr = 2", 2.0), ("lr = 0.00002", 2e-5), ('lr = "auto"', "auto"), ("lr = 1_000.5", 1000.5)],
)
def test_a_number_is_taken_in_every_way_toml_writes_it(folder, line, value):
    assert load(folder, MINIMAL + f"[optim]\n{line}\n").optim.lr == value


@pytest.mark.parametrize(
    ("table", "line", "key", "given", "wanted", "do"),
    [
        ("optim", 'lr = "2e-5"', "optim.lr", '"2e-5" is a string', 'a number above 0 and of at most 10000 or "auto"', "write lr = 2e-5, without quotes"),
        ("train", "max_steps = 4096.0", "train.max_steps", "4096.0 is a decimal number", "an integer above 0", "write max_steps = 4096"),
        ("train", "seed = true", "train.seed", "true is a truth value", "an integer of at least 0 and below 4294967296", ""),
        ("model", "trust_remote_code = 1", "model.trust_remote_code", "1 is an integer", "true or false", ""),
        ("log", "name = 3", "log.name", "3 is an integer", "a string", ""),
        ("train", "seed = -1", "train.seed", "-1 is out of range", "an integer of at least 0 and below 4294967296", ""),
        ("adapter", "targets = []", "adapter.targets", "[] is no choice of modules: leave it out for all linears of the decoder layers", "", ""),
        ("optim", "groups = [{match = 'norm'}]", "optim.groups.0", "a table is without lr and weight_decay: it would change nothing", "", ""),
        ("train", "seed = 4294967296", "train.seed", "4294967296 is out of range", "an integer of at least 0 and below 4294967296", ""),
        ("train", "epochs = inf", "train.epochs", "inf is not a finite number", "a number above 0 and of at most 10000", ""),
        ("train", "epochs = nan", "train.epochs", "nan is not a finite number", "a number above 0 and of at most 10000", ""),
        ("optim", "betas = [0.9, 1.5]", "optim.betas.1", "1.5 is out of range", "a number of at least 0 and below 1", ""),
        ("log", 'tags = "a"', "log.tags", '"a" is a string', "a list of strings", 'write tags = ["a"]'),
        ("log", 'trackers = "wandb"', "log.trackers", '"wandb" is a string, not a list',
         'a list of names ("tensorboard", "wandb", "mlflow" or "trackio")', 'write trackers = ["wandb"]'),
        ("data", "seq_len = 1", "data.seq_len", "1 is out of range", "an integer of at least 2 and of at most 16777216", ""),
        ("data", "seq_len = 99999999999999999999", "data.seq_len", "99999999999999999999 is out of range",
         "an integer of at least 2 and of at most 16777216", ""),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named_with_the_type_that_is_wanted(folder, table, line, key, given, wanted, do):
    text = MINIMAL.replace("[model]\n", f"[model]\n{line}\n") if table == "model" else MINIMAL + f"[{table}]\n{line}\n"
    error = refusal(folder, text)
    assert (error.where, error.problem, error.wanted, error.do) == (f"chat.toml: {key}", given, wanted, do)


# ---- unknown keys


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("[optim]\nweigth_decay = 0.1\n", "chat.toml: optim", "unknown key 'weigth_decay'; did you mean 'weight_decay'?"),
        ("[trian]\nepochs = 1\n", "chat.toml", "unknown table or key 'trian'; did you mean 'train'?"),
        ("[train]\nlr = 1e-4\n", "chat.toml: train", "unknown key 'lr'; it belongs to lr in [optim] or lr in [[optim.groups]]"),
        ("[train]\nlearning_rate = 1e-4\n", "chat.toml: train", "unknown key 'learning_rate'; here it is lr in [optim]"),
        ("[optim.schedule]\nname = 'linear'\nmin_ration = 0.1\n", "chat.toml: optim.schedule",
         "unknown key 'min_ration'; did you mean 'min_ratio'?"),
        ("[train.early_stop]\npatiense = 2\n", "chat.toml: train.early_stop", "unknown key 'patiense'; did you mean 'patience'?"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_key_that_was_meant(folder, text, where, problem):
    error = refusal(folder, MINIMAL + text)
    assert (error.where, error.problem) == (where, problem)


def test_a_key_in_an_item_of_a_list_is_found_by_its_number(folder):
    error = refusal(folder, MINIMAL + '[[data.train]]\npath = "rows.jsonl"\nformt = "text"\n')
    assert (error.where, error.problem) == ("chat.toml: data.train.1", "unknown key 'formt'; did you mean 'format'?")


def test_every_error_of_a_file_is_told_at_once(folder):
    error = refusal(folder, MINIMAL + '[optim]\nlr = "x"\n[train]\nepochs = "y"\nfoo = 1\n')
    assert [e.where for e in (error, *error.others)] == [
        "chat.toml: optim.lr",
        "chat.toml: train.epochs",
        "chat.toml: train",
    ]


# ---- unions told apart by name


def test_a_key_of_another_variant_names_the_variant_it_belongs_to(folder):
    error = refusal(folder, MINIMAL + '[adapter]\nname = "none"\nr = 8\n')
    assert error.problem == '\'r\' is no key of name = "none", but of "lora"'


@pytest.mark.parametrize(
    ("text", "where", "problem", "wanted"),
    [
        ('[adapter]\nname = "lorra"\n', "adapter.name", '"lorra" is not known; did you mean "lora"?', '"lora" or "none"'),
        ('[optim.schedule]\nname = "cosin"\n', "optim.schedule.name", '"cosin" is not known; did you mean "cosine"?',
         '"constant", "linear", "cosine" or "wsd"'),
        ('[data]\npacking = "sream"\n', "data.packing", '"sream" is not known; did you mean "stream"?',
             '"stream", "bfd", "even", "sequential" or "none"'),
    ],
)  # fmt: skip
def test_a_name_outside_the_choices_gets_the_nearest_and_all_of_them(folder, text, where, problem, wanted):
    minimal = MINIMAL if "[data]" not in text else '[model]\npath = "org/model"\n'
    rows = "" if "[data]" not in text else '[[data.train]]\npath = "rows.jsonl"\n'
    error = refusal(folder, minimal + text + rows)
    assert (error.where, error.problem, error.wanted) == (f"chat.toml: {where}", problem, wanted)


def test_a_variant_without_a_name_is_the_default_one(folder):
    assert load(folder, MINIMAL + "[adapter]\nr = 4\n").adapter.r == 4
    assert load(folder, MINIMAL + "[optim]\nschedule = {warmup_steps = 3}\n").optim.schedule.name == "cosine"


def test_a_name_where_a_table_is_wanted_shows_how_to_write_it(folder):
    error = refusal(folder, MINIMAL + '[optim]\nschedule = "linear"\n')
    assert error.do == 'write schedule = {name = "linear"}'


def test_single_brackets_for_the_data_list_are_explained(folder):
    error = refusal(folder, MINIMAL.replace("[[", "[").replace("]]", "]"))
    assert error.do == "write [[data.train]] with two brackets on each side: it is a list"


# ---- not TOML


@pytest.mark.parametrize(
    ("text", "line", "do"),
    [
        ("[model]\npath = org/model\n", 2, 'text needs quotes: path = "..."; true, false and numbers do not'),
        ("[model]\n\npath: model\n", 3, "TOML writes key = value, with an equals sign"),
        ('[model]\npath = "a"\n[model]\n', 3, "the key or table stands in the file twice: keep one"),
        ('[model]\npath = "unclosed\n', 2, "close the quotes"),
        ('[model\npath = "a"\n', 1, "fix the line"),
    ],
)
def test_a_syntax_error_names_file_and_line(folder, text, line, do):
    error = refusal(folder, text)
    assert error.where == f"chat.toml:{line}"
    assert error.do == do


def test_a_file_that_is_no_text_is_refused(folder):
    (folder / "chat.toml").write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_config(folder / "chat.toml")


def test_a_missing_file_gets_the_name_of_a_similar_one(folder, monkeypatch):
    load(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"no such file\ndo: did you mean chat\.toml"):
        load_config("chta.toml")


# ---- what is missing


def test_a_missing_model_or_data_shows_the_lines_to_add(folder):
    error = refusal(folder, "")
    assert (error.do, error.others[0].do) == (
        'add [model] with path = "organisation/model-or-folder"',
        'add [[data.train]] with path = "rows.jsonl"',
    )


@pytest.mark.parametrize(
    ("sets", "where", "problem", "do"),
    [
        (['data.train.0.path="othr.jsonl"'], "data.train.0.path", "othr.jsonl does not exist", "did you mean other.jsonl?"),
        (["data.train.0.path=none/*.jsonl"], "data.train.0.path", "nothing matches none/*.jsonl",
         "check the pattern and the folder it counts from"),
        (["data.template=chat.jinja"], "data.template", "chat.jinja does not exist", "check the spelling"),
        (["model.path=./missing"], "model.path", "missing does not exist", "check the spelling"),
        (["model.path=model.gguf"], "model.path", "model.gguf does not exist", "check the spelling"),
        (["data.train.0.path=ftp://example.com/rows.jsonl"], "data.train.0.path",
         '"ftp://example.com/rows.jsonl" is a URL of a kind that is not read', ""),
    ],
)  # fmt: skip
def test_missing_inputs_are_told_before_anything_is_loaded(folder, sets, where, problem, do):
    error = refusal(folder, MINIMAL, *sets)
    assert (error.where, error.problem, error.do) == (f"chat.toml: {where}", problem, do)


# ---- paths


def test_paths_in_the_file_count_from_the_file_and_paths_in_set_from_here(folder):
    config = load(folder, MINIMAL, "data.eval.0.path=other.jsonl", "train.out=mine")
    assert config.data.train[0].path == str(folder / "rows.jsonl")
    assert config.data.eval[0].path == str(Path.cwd() / "other.jsonl")
    assert config.train.out == str(Path.cwd() / "mine")


def test_a_directory_beats_a_hub_id_of_the_same_spelling(folder):
    assert load(folder).model.path == "org/model"
    (folder / "org" / "model").mkdir(parents=True)
    assert load(folder).model.path == str(folder / "org" / "model")


def test_a_built_in_template_is_a_name_and_a_jinja_file_is_a_path(folder):
    (folder / "chat.jinja").write_text("")
    chat = MINIMAL.replace("[[data", '[data]\ntemplate = "chat.jinja"\n[[data')
    named = MINIMAL.replace("[[data", '[data]\ntemplate = "chatml"\n[[data')
    assert load(folder, chat).data.template == str(folder / "chat.jinja")
    assert load(folder, named).data.template == "chatml"


# ---- --set


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("3", 3),
        ("true", True),
        ("linear", "linear"),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ('["a", "b"]', ["a", "b"]),
        ('{name = "linear"}', {"name": "linear"}),
        ("../rows.jsonl", "../rows.jsonl"),
        ("a=b", "a=b"),
        ("two words", "two words"),
        ("", ""),
        ("2024-01-01", "2024-01-01"),
        ("1\nx = 2", "1\nx = 2"),
    ],
)
def test_a_set_value_is_toml_and_a_bare_word_a_string(text, value):
    assert parse_value(text) == value


def test_set_reaches_items_of_lists_and_names_with_dots(folder):
    config = load(folder, MINIMAL, "data.train.1.path=other.jsonl", 'data.train.0.roles."my.bot"=assistant')
    assert len(config.data.train) == 2
    assert config.data.train[0].roles == {"my.bot": "assistant"}


def test_set_fills_in_what_the_file_leaves_out(folder):
    config = load(folder, "", "model.path=org/model", "data.train.0.path=other.jsonl", "optim.schedule.name=linear")
    assert config.optim.schedule.name == "linear"


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("optim.lr", "--set optim.lr", "there is no value"),
        ("=3", "--set =3", "there is no key"),
        ("data.train.3.path=x", "--set data.train.3.path", "data.train has 1 items, 0 to 0"),
        ("data.train.path=x", "--set data.train.path", "data.train has 1 items, 0 to 0"),
        ("model.path.x=3", "--set model.path.x", "model.path is no table"),
        ("optim.lr=fast", "--set optim.lr", '"fast" is a string'),
        ("optim.momentun=0.9", "--set optim", "unknown key 'momentun'; did you mean momentum in [optim]?"),
        ("optim.momentum=0.9", "--set optim", '\'momentum\' is no key of name = "adamw", but of "muon"'),
        ("a b.c=3", "--set a b.c", "is no key of a table"),
        ("data.control_tokens=txet", "--set data.control_tokens", '"txet" is not known; did you mean "text"?'),
        ("log.tags=[a, b]", "--set log.tags", '"[a, b]" is no TOML value'),
    ],
)
def test_a_wrong_set_is_named_as_it_was_given(folder, text, where, problem):
    error = refusal(folder, MINIMAL, text)
    assert (error.where, error.problem) == (where, problem)


def test_a_number_for_a_text_key_shows_the_quotes_for_shell_and_toml(folder):
    assert refusal(folder, MINIMAL, "log.name=7").do == "quote it for the shell and for TOML: --set 'log.name=\"7\"'"


def test_a_config_made_in_python_is_checked_like_a_file(folder, monkeypatch):
    monkeypatch.chdir(folder)
    made = Config.model_validate({"model": {"path": "org/model"}, "data": {"train": [{"path": "rows.jsonl"}]}})
    assert load_config(made).data.train[0].path == str(folder / "rows.jsonl")
    assert load_config(load_config(made)) == load_config(made)
    both = made.model_copy(update={"train": made.train.model_copy(update={"accumulate": 2, "tokens_per_step": 2})})
    with pytest.raises(ConfigError, match="both say how large an optimizer step is"):
        load_config(both)


# ---- what says nothing, or cannot be


@pytest.mark.parametrize(
    ("key", "do"),
    [
        ("model.path", "give it a value"),
        ("model.revision", "give it a value, or take the key out"),
        ("train.out", "give it a value, or take the key out"),
        ("data.store", "give it a value, or take the key out"),
        ("data.template", "give it a value, or take the key out"),
        ("adapter.path", "give it a value, or take the key out"),
        ("log.project", "give it a value, or take the key out"),
        ("data.train.0.path", "give it a value"),
    ],
)
def test_an_empty_string_is_refused_under_every_key(folder, key, do):
    error = refusal(folder, MINIMAL, f'{key}=""')
    assert (error.where, error.problem, error.do) == (f"--set {key}", "is empty", do)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log.trackers", '["wandb", "wandb"]'),
        ("log.tags", '["wandb", "x", "wandb"]'),
        ("adapter.targets", '["wandb", "wandb"]'),
        ("adapter.modules_to_save", '["wandb", "wandb"]'),
        ("model.add_tokens", '["wandb", "wandb"]'),
    ],
)
def test_a_name_that_stands_in_a_list_twice_is_refused(folder, key, value):
    error = refusal(folder, MINIMAL, f"{key}={value}")
    assert error.problem == f'{value} is a list with "wandb" more than once'


@pytest.mark.parametrize("key", ["train.out", "data.store", "model.path", "adapter.path", "data.train.0.path"])
def test_a_path_that_no_file_can_have_is_refused(folder, key):
    assert "holds a NUL character" in refusal(folder, MINIMAL, f'{key}="a\\u0000b"').problem
    error = refusal(folder, MINIMAL, f'{key}="~no-such-user-here/x"')
    assert (error.where, error.problem) == (f"--set {key}", "~no-such-user-here is no user's home here")


def test_a_name_that_is_not_utf_8_is_refused_before_it_has_to_be_written_down(tmp_path):
    import os

    path = os.fsdecode(os.fsencode(tmp_path) + b"/a\xffb.toml")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    Path(path).write_text(MINIMAL)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_config(path)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000 + "]" * 5000, ".".join("a" * 3000) + " = 1", "a = " + "[" * 40 + "]" * 40]
)
def test_tables_in_tables_without_end_are_refused(folder, text):
    for error in (refusal(folder, text), refusal(folder, MINIMAL, text.replace(" = ", "=", 1))):
        assert (error.problem, error.wanted) == ("tables or lists are nested too deeply", "at most 32 levels")
    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config(deep)


@pytest.mark.parametrize("key", ["data.train.0.path", "data.template", "model.path"])
def test_what_is_there_and_of_no_use_is_called_by_its_name(folder, key):
    import os

    os.mkfifo(folder / "pipe")
    (folder / "link.jinja").symlink_to("nowhere")
    text = MINIMAL.replace("rows.jsonl", str(folder / "rows.jsonl"))
    assert refusal(folder, text, f"{key}={folder}/pipe").problem.endswith("pipe is a pipe")
    problem = refusal(folder, text, f"{key}={folder}/link.jinja").problem
    assert problem.endswith("link.jinja is a link to nowhere, which does not exist")


def test_a_config_that_is_a_dangling_link_is_no_suggestion_of_itself(folder):
    (folder / "chat.toml").symlink_to("nowhere.toml")
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "chat.toml")
    assert (caught.value.problem, caught.value.do) == ("is a link to nowhere.toml, which does not exist", "")


# ---- words of other programs, and everything at once


@pytest.mark.parametrize(
    ("text", "problem", "do"),
    [
        (MINIMAL + "[lora]\nr = 8\n", "unknown table or key 'lora'; here it is [adapter]", ""),
        (MINIMAL + "[logging]\nevery_steps = 8\n", "unknown table or key 'logging'; here it is [log]", ""),
        ('model.path = "x"\ndata.train = "rows.jsonl"\n', '"rows.jsonl" is a string, not a list',
         'write the table [[data.train]] with path = "rows.jsonl"'),
        ('model.path = "x"\ndata.train = ["rows.jsonl"]\n', '"rows.jsonl" is a string',
         'write the table [[data.train]] with path = "rows.jsonl"'),
    ],
)  # fmt: skip
def test_the_usual_other_spellings_are_told_ours(folder, text, problem, do):
    error = refusal(folder, text)
    assert (error.problem, error.do) == (problem, do)


def test_a_string_for_a_list_by_set_says_how_to_write_it(folder):
    assert refusal(folder, MINIMAL, "log.trackers=wandb").do == "--set 'log.trackers=[\"wandb\"]'"
    assert refusal(folder, MINIMAL, "data.train=rows.jsonl").do == "--set data.train.0.path=rows.jsonl"


def test_a_secret_does_not_hide_the_other_errors(folder):
    error = refusal(folder, MINIMAL + '[optim]\nlr = "x"\n[log]\nwandb_api_key = "abcdefgh12345"\nprojct = "a"\n')
    places = [one.where for one in (error, *error.others)]
    assert places == ["chat.toml: log.wandb_api_key", "chat.toml: optim.lr", "chat.toml: log"]
    assert not any("abcdefgh12345" in str(one) for one in (error, *error.others))
