//! The tokenizer and template of a model directory, as `rft` reads them (python/rft/models/tokenizer.py): the same text, so the
//! same key. What only Python can make (GGUF vocabularies, tokenizers without a tokenizer.json) is refused by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use rft_core::spec::TokenizerSpec;
use rft_core::template::Template;
use rft_core::tokenizer::unicode::Version;
use rft_core::{Error, Kind, Result};
use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use crate::config::Config;

const SPECIAL: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Templates that come with rft.
const BUILT_IN: [(&str, &str); 4] = [
    ("chatml", include_str!("../../../python/rft/data/templates/chatml.jinja")),
    ("gemma", include_str!("../../../python/rft/data/templates/gemma.jinja")),
    ("llama3", include_str!("../../../python/rft/data/templates/llama3.jinja")),
    ("plain", include_str!("../../../python/rft/data/templates/plain.jinja")),
];
/// Begin of a text that templates are tried on.
const PROBE: &str = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}"#;

/// What a model says of text.
pub struct Model {
    /// Ids.
    pub tokenizer: TokenizerSpec,
    /// The chat template that `data.template` asks for.
    pub template: Option<String>,
}

fn wrong(place: impl Into<String>, problem: impl std::fmt::Display) -> Error {
    Error::new(Kind::Tokenizer, place, problem)
}

impl Model {
    /// Reads the directory of `model.path`.
    ///
    /// # Errors
    /// It is none, or holds nothing that can be read without Python.
    pub fn read(config: &Config) -> Result<Model> {
        let folder = Folder(directory(config)?);
        let mut settings: Map<String, Value> =
            folder.json("special_tokens_map.json")?.into_iter().filter(|(name, _)| is_special(name)).collect();
        settings.extend(folder.json("tokenizer_config.json")?);
        let Some(text) = folder.text("tokenizer.json")? else {
            return Err(wrong(folder.place("tokenizer.json"), "there is none")
                .wanted("a tokenizer.json: other files become one in Python")
                .remedy("use `rft prepare`, or save the tokenizer with transformers once"));
        };
        let mut tokenizer = text
            .parse::<Tokenizer>()
            .map_err(|e| wrong(folder.place("tokenizer.json"), format!("cannot be read: {e}")))?;
        if !settings.contains_key("eos_token")
            && let Some(token) = end_of_model(&folder.json("config.json")?, &tokenizer)
        {
            settings.insert("eos_token".into(), token.into());
        }
        let own = own_template(&folder, &settings)?;
        let mut spec = finished(&mut tokenizer, &settings, &config.model.add_tokens, &folder)?;
        spec.unicode = config.model.unicode;
        let template = chosen_template(config, own, &spec)?;
        if let Some(source) = &template {
            check_template(&config.data.template, source, &spec.special)?;
        }
        Ok(Model { tokenizer: spec, template })
    }
}

struct Folder(PathBuf);

impl Folder {
    fn place(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    fn text(&self, name: &str) -> Result<Option<String>> {
        match fs::read_to_string(self.0.join(name)) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(wrong(self.place(name), format!("cannot be read: {e}"))),
        }
    }

    fn json(&self, name: &str) -> Result<Map<String, Value>> {
        let Some(text) = self.text(name)? else { return Ok(Map::new()) };
        match serde_json::from_str(&text) {
            Ok(Value::Object(found)) => Ok(found),
            Ok(_) => Ok(Map::new()),
            Err(e) => Err(wrong(self.place(name), format!("not JSON: {e}"))),
        }
    }
}

fn is_special(name: &str) -> bool {
    SPECIAL.contains(&name)
}

/// A directory, or that of a hub id in the hub's own cache.
fn directory(config: &Config) -> Result<PathBuf> {
    let given = &config.model.path;
    let local = config.path(given);
    if local.is_dir() {
        return Ok(local);
    }
    let place = format!("model.path = {given:?}");
    if local.is_file() {
        return Err(wrong(place, "a file: GGUF vocabularies are read in Python").remedy("use `rft prepare`"));
    }
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || Some(variable("HOME")?.join(".cache").join("huggingface"));
    let cache = variable("HF_HUB_CACHE").or_else(|| Some(variable("HF_HOME").or_else(home)?.join("hub")));
    let revision = config.model.revision.as_deref().unwrap_or("main");
    if let Some(repository) = cache.map(|cache| cache.join(format!("models--{}", given.replace('/', "--")))) {
        let commit = fs::read_to_string(repository.join("refs").join(revision));
        let snapshot = repository.join("snapshots").join(commit.as_deref().unwrap_or(revision).trim());
        if snapshot.is_dir() {
            return Ok(snapshot);
        }
    }
    Err(wrong(place, "no directory, and nothing of that name is in the hub's cache")
        .remedy(format!("`hf download {given} --include \"*token*\" \"*.jinja\" config.json`, or give a directory")))
}

/// Text of a special token, which configs write as a string or as {"content": ...}.
fn content(value: &Value) -> Option<&str> {
    value.get("content").unwrap_or(value).as_str().filter(|text| !text.is_empty())
}

fn end_of_model(settings: &Map<String, Value>, tokenizer: &Tokenizer) -> Option<String> {
    let value = settings.get("eos_token_id")?;
    let first = value.as_array().map_or(Some(value), |ids| ids.first())?;
    tokenizer.id_to_token(u32::try_from(first.as_u64()?).ok()?)
}

fn own_template(folder: &Folder, settings: &Map<String, Value>) -> Result<Option<String>> {
    let mut found = folder.text("chat_template.jinja")?.map(Value::from);
    if found.is_none() {
        found = settings.get("chat_template").filter(|value| !value.is_null()).cloned();
    }
    if found.is_none() {
        found = folder.json("chat_template.json")?.get("chat_template").cloned();
    }
    let text = match found {
        Some(Value::Array(entries)) => {
            let default = entries.iter().rev().find(|entry| entry["name"] == "default");
            default.and_then(|entry| entry["template"].as_str().map(String::from))
        }
        Some(Value::Object(named)) => named.get("default").and_then(Value::as_str).map(String::from),
        Some(Value::String(text)) => Some(text),
        _ => None,
    };
    Ok(text.filter(|text| !text.is_empty()))
}

fn finished(
    tokenizer: &mut Tokenizer,
    settings: &Map<String, Value>,
    add_tokens: &[String],
    folder: &Folder,
) -> Result<TokenizerSpec> {
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|e| wrong(folder.place("tokenizer.json"), e))?;
    add_listed(tokenizer, settings.get("added_tokens_decoder"))?;
    let special: BTreeMap<String, String> = SPECIAL
        .iter()
        .filter_map(|name| Some((*name, content(settings.get(*name)?)?)))
        .filter(|(_, text)| tokenizer.token_to_id(text).is_some())
        .map(|(name, text)| (name.to_string(), text.to_string()))
        .collect();
    let extra = ["extra_special_tokens", "additional_special_tokens"].iter().find_map(|name| {
        let value = settings.get(*name)?;
        let values: Vec<&Value> = match value {
            Value::Object(named) => named.values().collect(),
            Value::Array(list) => list.iter().collect(),
            _ => Vec::new(),
        };
        (!values.is_empty()).then_some(values)
    });
    let known: Vec<String> = tokenizer.get_added_tokens_decoder().values().map(|token| token.content.clone()).collect();
    let in_order = SPECIAL.iter().filter_map(|name| special.get(*name).map(String::as_str));
    let wanted: Vec<AddedToken> = in_order
        .chain(extra.into_iter().flatten().filter_map(content))
        .filter(|text| !known.iter().any(|known| known == text) && tokenizer.token_to_id(text).is_some())
        .map(|text| AddedToken::from(text, true).normalized(false))
        .collect();
    if !wanted.is_empty() {
        add(tokenizer, wanted, true)?;
    }
    let place = folder.0.display().to_string();
    let Some(end) = special.get("eos_token") else {
        return Err(wrong(place, "the tokenizer names no end token (eos_token) that is in its vocabulary")
            .remedy("set \"eos_token\" in tokenizer_config.json"));
    };
    let id = |text: &String| tokenizer.token_to_id(text);
    let bos_id = special.get("bos_token").and_then(id);
    let eos_id = id(end).ok_or_else(|| wrong(&place, "its end token has no id"))?;
    let first = tokenizer.encode("a", true).map_err(|e| wrong(&place, e))?.get_ids().first().copied();
    let add_bos = bos_id.is_some() && first == bos_id;
    let mut vocab_size = tokenizer.get_vocab(true).into_values().max().map_or(0, |last| last + 1);
    for text in add_tokens {
        if text.trim().is_empty() {
            return Err(wrong("model.add_tokens", format!("{text:?} is no token")));
        }
        if tokenizer.token_to_id(text).is_some() {
            continue;
        }
        let control = text.starts_with("<|") && text.ends_with("|>");
        let token = AddedToken::from(text.as_str(), control).normalized(false);
        add(tokenizer, vec![token], control)?;
        vocab_size = vocab_size.max(tokenizer.token_to_id(text).map_or(0, |index| index + 1));
    }
    let json = tokenizer.to_string(false).map_err(|e| wrong(place, e))?;
    let special = special.into_iter().map(|(name, text)| (name, Some(text))).collect();
    Ok(TokenizerSpec { json, special, add_bos, eos_id, bos_id, vocab_size, unicode: Version::default() })
}

/// Tokens that tokenizer_config.json lists by id and the file lacks, in order of their ids.
fn add_listed(tokenizer: &mut Tokenizer, listed: Option<&Value>) -> Result<()> {
    let Some(listed) = listed.and_then(Value::as_object) else { return Ok(()) };
    let mut entries: Vec<(usize, &Value)> =
        listed.iter().filter_map(|(index, entry)| Some((index.parse().ok()?, entry))).collect();
    entries.sort_by_key(|(index, _)| *index);
    for (index, entry) in entries {
        let Some(text) = content(entry) else { continue };
        if tokenizer.token_to_id(text).is_some() || index != tokenizer.get_vocab_size(true) {
            continue;
        }
        let flag = |name: &str| entry[name].as_bool().unwrap_or(false);
        let token = AddedToken::from(text, flag("special"))
            .single_word(flag("single_word"))
            .lstrip(flag("lstrip"))
            .rstrip(flag("rstrip"))
            .normalized(flag("normalized"));
        add(tokenizer, vec![token], flag("special"))?;
    }
    Ok(())
}

fn add(tokenizer: &mut Tokenizer, tokens: Vec<AddedToken>, special: bool) -> Result<()> {
    let added = if special { tokenizer.add_special_tokens(tokens) } else { tokenizer.add_tokens(tokens) };
    added.map(|_| ()).map_err(|e| wrong("tokenizer.json", e))
}

fn chosen_template(config: &Config, own: Option<String>, spec: &TokenizerSpec) -> Result<Option<String>> {
    let setting = config.data.template.as_str();
    if setting == "model" {
        return Ok(own);
    }
    if let Some((_, source)) = BUILT_IN.iter().find(|(name, _)| *name == setting) {
        let bos = if spec.add_bos && !source.contains("bos_token") { "{{- bos_token -}}\n" } else { "" };
        return Ok(Some(format!("{bos}{source}")));
    }
    let path = config.path(setting);
    fs::read_to_string(&path).map(Some).map_err(|e| {
        Error::new(Kind::Argument, "data.template", format!("{setting:?} is neither built in nor a file ({e})"))
            .wanted("model, a .jinja file, chatml, gemma, llama3 or plain")
    })
}

/// Refuses a template that this engine (minijinja) does not know all the words of. `rft prepare` renders such in Python.
fn check_template(name: &str, source: &str, special: &BTreeMap<String, Option<String>>) -> Result<()> {
    let needs_python = |problem: String| {
        Error::new(Kind::Template, format!("data.template ({name})"), format!("needs Python's jinja2: {problem}"))
            .remedy("use `rft prepare`, which has it; or another data.template")
    };
    let template = Template::new(source, special).map_err(|e| needs_python(e.problem))?;
    let conversation: Value = serde_json::from_str(PROBE).map_err(|e| Error::new(Kind::Argument, "probe", e))?;
    match template.render_json(&conversation, false) {
        Err(problem) if problem.contains("unknown") => Err(needs_python(problem)),
        // Whatever else it refuses of this one chat, it may refuse in jinja2 as well: rows will tell.
        _ => Ok(()),
    }
}
