//! A chat template in Jinja, rendered by minijinja as `transformers` renders it with jinja2.
//!
//! `{% generation %}` becomes a filter block that wraps its text in two noncharacters, which gives the spans.
//! A render is bounded by fuel, so that no template runs for ever or fills the memory.

use std::collections::BTreeMap;
use std::ffi::CString;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error as JinjaError, ErrorKind, State};
use serde_json::Value as Json;

use crate::chat::{self, Looks};
use crate::error::{Error, Kind, Result};
use crate::pytext;

/// Put behind the first character of a control token that is spelled in a row.
pub const MARK: char = '\u{fdd0}';
/// Where text of a generation tag starts.
pub const SPAN_START: char = '\u{fdd1}';
/// Where text of a generation tag ends.
pub const SPAN_END: char = '\u{fdd2}';
/// An edge of a message's content, in renders that look for it.
pub const CONTENT_EDGE: char = '\u{fdd3}';

/// Work of one render: about this many instructions, or [`BYTES_PER_FUEL`] times as many bytes, which minijinja counts
/// where it makes them, and before where it knows how many.
const FUEL: u64 = 5_000_000;
const BYTES_PER_FUEL: usize = 64;
const NAME: &str = "chat_template";
const FILTER: &str = "__rft_generation";

/// Stack for what fuel lets a template nest: its values are written, compared and dropped level by level. Pages that are not
/// touched cost nothing.
const STACK: usize = 512 << 20;

/// Runs renders with room for what they nest; inside, each render finds that room and takes none of its own.
pub fn with_room<T>(work: impl FnOnce() -> T) -> T {
    stacker::maybe_grow(STACK / 2, STACK, work)
}

/// A rendered chat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text, marks of neutralised control tokens still in it.
    pub text: String,
    /// Byte ranges of generation tags, in order.
    pub spans: Vec<(usize, usize)>,
}

/// A compiled chat template. Shared by threads.
pub struct Template {
    environment: Environment<'static>,
    special: Vec<(String, Value)>,
    tagged: bool,
}

impl Template {
    /// Compiles a template. `special` are bos_token and so on.
    pub fn new(source: &str, special: &BTreeMap<String, Option<String>>) -> Result<Template> {
        let (source, tagged) = rewrite_tags(source);
        let mut environment = environment();
        environment.add_template_owned(NAME, source).map_err(|e| {
            Error::new(Kind::Template, "chat template", describe(&e)).remedy("mend the template, or set data.template")
        })?;
        let special =
            special.iter().filter_map(|(name, token)| Some((name.clone(), Value::from(token.as_deref()?)))).collect();
        Ok(Template { environment, special, tagged })
    }

    /// Whether the template says itself what is generated.
    pub fn tagged(&self) -> bool {
        self.tagged
    }

    /// Renders a chat; the error is a sentence.
    pub fn render(
        &self,
        messages: Vec<Value>,
        extra: &[(String, Value)],
        add_generation_prompt: bool,
    ) -> std::result::Result<Rendered, String> {
        let template = self.environment.get_template(NAME).map_err(|e| describe(&e))?;
        let mut context: Vec<(String, Value)> = self.special.clone();
        context.push(("tools".into(), Value::from(())));
        context.push(("documents".into(), Value::from(())));
        context.extend_from_slice(extra);
        context.push(("messages".into(), Value::from(messages)));
        context.push(("add_generation_prompt".into(), Value::from(add_generation_prompt)));
        let text = with_room(|| template.render(Value::from_pairs(context)).map_err(|e| describe(&e)))?;
        Ok(cut_spans(text))
    }

    /// Renders a conversation given as JSON `{messages, tools?, ...}`.
    pub fn render_json(
        &self,
        conversation: &Json,
        add_generation_prompt: bool,
    ) -> std::result::Result<Rendered, String> {
        let Json::Object(fields) = conversation else {
            return Err("the conversation is no JSON object".into());
        };
        let Some(Json::Array(messages)) = fields.get("messages") else {
            return Err("the conversation has no list of messages".into());
        };
        let messages = messages.iter().map(to_value).collect();
        let given = fields.iter().filter(|(name, _)| *name != "messages" && *name != "add_generation_prompt");
        let extra: Vec<(String, Value)> = given.map(|(name, value)| (name.clone(), to_value(value))).collect();
        self.render(messages, &extra, add_generation_prompt)
    }
}

/// What a template looks at in contents; none where that cannot be told.
pub fn looks(source: &str, parts: bool) -> Option<Looks> {
    chat::looks(&rewrite_tags(source).0, syntax()?, parts)
}

fn syntax() -> Option<SyntaxConfig> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().ok()
}

/// Whether a template has generation tags.
pub fn has_tags(source: &str) -> bool {
    rewrite_tags(source).1
}

/// `{% generation %}` and `{% endgeneration %}` as a filter block; whether there was one.
fn rewrite_tags(source: &str) -> (String, bool) {
    let (mut out, mut rest, mut found) = (String::with_capacity(source.len() + 64), source, false);
    while let Some(open) = rest.find("{%") {
        out.push_str(&rest[..open]);
        let tag = &rest[open..];
        let inner = &tag[2..];
        let (left, body) = split_sign(inner);
        let word = body.trim_start();
        let replaced = [("generation", format!(" filter {FILTER} ")), ("endgeneration", " endfilter ".to_string())]
            .into_iter()
            .find_map(|(name, new)| {
                let after = word.strip_prefix(name)?.trim_start();
                let (right, after) = split_sign(after);
                let after = after.strip_prefix("%}")?;
                Some((format!("{{%{left}{new}{right}%}}"), after))
            });
        match replaced {
            Some((new, after)) => {
                found = true;
                out.push_str(&new);
                rest = after;
            }
            None => {
                out.push_str("{%");
                rest = inner;
            }
        }
    }
    out.push_str(rest);
    (out, found)
}

/// A white-space sign at the head of a tag's text.
fn split_sign(text: &str) -> (&str, &str) {
    match text.as_bytes().first() {
        Some(b'-' | b'+') => text.split_at(1),
        _ => ("", text),
    }
}

/// Takes the span marks out of a rendered text.
fn cut_spans(text: String) -> Rendered {
    if !text.contains([SPAN_START, SPAN_END]) {
        return Rendered { text, spans: Vec::new() };
    }
    let (mut clean, mut spans, mut open) = (String::with_capacity(text.len()), Vec::new(), Vec::new());
    for piece in text.split_inclusive([SPAN_START, SPAN_END]) {
        let mark = piece.chars().next_back();
        let body = piece.trim_end_matches([SPAN_START, SPAN_END]);
        clean.push_str(body);
        match mark {
            Some(SPAN_START) => open.push(clean.len()),
            Some(SPAN_END) => {
                if let Some(start) = open.pop()
                    && open.is_empty()
                {
                    spans.push((start, clean.len()));
                }
            }
            _ => {}
        }
    }
    Rendered { text: clean, spans }
}

/// JSON as a template's value.
pub fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(to_value).collect::<Vec<Value>>().into(),
        Json::Object(fields) => Value::from_pairs(fields.iter().map(|(name, value)| (name.as_str(), to_value(value)))),
    }
}

fn describe(error: &JinjaError) -> String {
    let mut text = match error.detail() {
        Some(detail) if error.kind() == ErrorKind::OutOfFuel => format!("it does too much work: {detail}"),
        Some(detail) => detail.to_string(),
        None => error.kind().to_string(),
    };
    if let Some(line) = error.line() {
        text.push_str(&format!(" (line {line} of the template)"));
    }
    text
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    if let Some(syntax) = syntax() {
        env.set_syntax(syntax);
    }
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(python_method);
    env.set_formatter(|out, state, value| {
        let written = match value.kind() {
            ValueKind::String => out.write_str(value.as_str().unwrap_or_default()),
            ValueKind::Undefined => Ok(()),
            _ => out.write_str(&pytext::str_of(value, left(state))?),
        };
        written.map_err(|_| JinjaError::new(ErrorKind::WriteFailure, "cannot write the text"))
    });
    env.add_filter(FILTER, |text: &str| format!("{SPAN_START}{text}{SPAN_END}"));
    env.add_filter("tojson", |state: &State, value: &Value, indent: Option<Value>, kwargs: Kwargs| {
        pytext::json_dumps(value, &pytext::JsonStyle::from_kwargs(indent, &kwargs)?, left(state))
    });
    // Python strips four separators that Unicode does not call white space.
    env.add_filter("trim", |state: &State, text: &Value, chars: Option<String>| {
        let text = text.as_str().map_or_else(|| pytext::str_of(text, left(state)), |text| Ok(text.to_string()))?;
        let drop = |c: char| chars.as_ref().map_or_else(|| is_python_space(c), |set| set.contains(c));
        Ok::<String, JinjaError>(text.trim_matches(drop).to_string())
    });
    env.add_filter("string", |state: &State, value: &Value| pytext::str_of(value, left(state)));
    // minijinja says that none can be iterated and that only lists are sequences; jinja2 asks Python.
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    });
    env.add_function("raise_exception", |message: String| -> std::result::Result<Value, JinjaError> {
        Err(JinjaError::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", |format: &str| {
        local_time(format).ok_or_else(|| JinjaError::new(ErrorKind::InvalidOperation, "no such time format"))
    });
    env
}

/// How many bytes a render may still make.
fn left(state: &State) -> usize {
    state.fuel_levels().map_or(usize::MAX, |(_, left)| (left as usize).saturating_mul(BYTES_PER_FUEL))
}

/// The local time in a `strftime` format.
fn local_time(format: &str) -> Option<String> {
    let format = CString::new(format).ok()?;
    if format.is_empty() {
        return Some(String::new());
    }
    let mut buffer = [0u8; 256];
    // SAFETY: `time` takes null; `localtime_r` fills the struct we own; `strftime` writes at most the buffer's length
    // and reads a NUL-terminated format.
    let written = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut parts: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&now, &mut parts).is_null() {
            return None;
        }
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), format.as_ptr(), &parts)
    };
    (written > 0).then(|| String::from_utf8_lossy(&buffer[..written]).into_owned())
}

/// White space as Python's `str.strip` sees it: Unicode's, and four separators that Unicode leaves out.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Methods of Python's str, dict and list that templates call: ours where pycompat lacks or misses one.
fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> std::result::Result<Value, JinjaError> {
    // Lists of parts are paid before they are made: 64 bytes a part.
    let parts = match (value.as_str(), method, args.first().and_then(Value::as_str)) {
        (Some(text), "split", None) => text.split(is_python_space).count(),
        (Some(text), "rsplit", Some(separator)) => text.matches(separator).count(),
        _ => 0,
    };
    state.consume_fuel(parts as u64)?;
    if let Some(text) = value.as_str()
        && let Some(result) = str_method(text, method, args)
    {
        return result;
    }
    if value.kind() == ValueKind::Seq
        && method == "index"
        && let Some(found) = value.try_iter()?.position(|item| Some(&item) == args.first())
    {
        return Ok(Value::from(found));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn str_method(text: &str, method: &str, args: &[Value]) -> Option<std::result::Result<Value, JinjaError>> {
    let strip = |left: bool, right: bool| -> std::result::Result<Value, JinjaError> {
        let (chars,): (Option<String>,) = from_args(args)?;
        let drop = |c: char| chars.as_ref().map_or_else(|| is_python_space(c), |set| set.contains(c));
        let text = if left { text.trim_start_matches(drop) } else { text };
        Ok(Value::from(if right { text.trim_end_matches(drop) } else { text }))
    };
    let one = || -> std::result::Result<String, JinjaError> { from_args::<(String,)>(args).map(|(part,)| part) };
    let triple = |parts: Option<(&str, &str)>, separator: &str, whole_first: bool| match parts {
        Some((head, tail)) => Value::from(Tuple::from([head.into(), separator.into(), Value::from(tail)])),
        None if whole_first => Value::from(Tuple::from([Value::from(text), "".into(), "".into()])),
        None => Value::from(Tuple::from(["".into(), "".into(), Value::from(text)])),
    };
    let result = match method {
        "strip" => strip(true, true),
        "lstrip" => strip(true, false),
        "rstrip" => strip(false, true),
        "removeprefix" => one().map(|part| Value::from(text.strip_prefix(part.as_str()).unwrap_or(text))),
        "removesuffix" => one().map(|part| Value::from(text.strip_suffix(part.as_str()).unwrap_or(text))),
        "partition" => one().map(|part| triple(text.split_once(part.as_str()), &part, true)),
        "rpartition" => one().map(|part| triple(text.rsplit_once(part.as_str()), &part, false)),
        "rsplit" => rsplit(text, args),
        "swapcase" => from_args(args).map(|(): ()| {
            let flip =
                |c: char| if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() };
            Value::from(text.chars().map(flip).collect::<String>())
        }),
        "casefold" => from_args(args).map(|(): ()| Value::from(text.to_lowercase())),
        "split" if args.is_empty() => {
            Ok(text.split(is_python_space).filter(|part| !part.is_empty()).map(Value::from).collect())
        }
        _ => return None,
    };
    Some(result)
}

fn rsplit(text: &str, args: &[Value]) -> std::result::Result<Value, JinjaError> {
    let (separator, rest): (String, Rest<Value>) = from_args(args)?;
    let limit = rest.first().and_then(Value::as_i64).filter(|limit| *limit >= 0);
    let mut parts: Vec<Value> = match limit {
        Some(limit) => text.rsplitn(limit as usize + 1, separator.as_str()).map(Value::from).collect(),
        None => text.rsplit(separator.as_str()).map(Value::from).collect(),
    };
    parts.reverse();
    Ok(Value::from(parts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn template(source: &str) -> Template {
        let special = BTreeMap::from([("bos_token".to_string(), Some("<s>".to_string()))]);
        Template::new(source, &special).expect("template")
    }

    fn render(source: &str, conversation: Json) -> String {
        template(source).render_json(&conversation, false).expect("text").text
    }

    #[test]
    fn generation_tags_give_spans_and_keep_their_white_space_signs() {
        let source = "{% for m in messages %}\n[{{ m.role }}]{%- generation -%}\n  {{ m.content }}\n{%- endgeneration -%}!\n{% endfor %}";
        let chat = json!({"messages": [{"role": "a", "content": "x"}, {"role": "b", "content": "yé"}]});
        let rendered = template(source).render_json(&chat, false).expect("text");
        assert_eq!(rendered.text, "[a]x!\n[b]yé!\n");
        let spans: Vec<&str> = rendered.spans.iter().map(|&(a, b)| &rendered.text[a..b]).collect();
        assert_eq!(spans, ["x", "yé"]);
    }

    #[test]
    fn a_tag_named_like_generation_is_left_alone() {
        assert!(!has_tags("{% if generation %}{% set generation = 1 %}{% endif %}{{ 'generation' }}"));
        assert!(has_tags("{%-generation%}x{% endgeneration -%}"));
    }

    #[test]
    fn python_habits_hold() {
        let empty = json!({"messages": []});
        for (source, text) in [
            ("{{ none is iterable }} {{ [] is iterable }} {{ 'a' is sequence }}", "False True True"),
            ("{{ ' a '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'a.b.c'.rsplit('.', 1) }}", "a|a|['a.b', 'c']"),
            ("{{ 'k=v=w'.partition('=')[2] }} {{ [1,2,3][::-1] }}", "v=w [3, 2, 1]"),
            ("{{ {'a': none, 'b': [1.0]} | tojson }}", "{\"a\": null, \"b\": [1.0]}"),
            ("{{ tools is none }} {{ documents is defined }} {{ bos_token }}", "True True <s>"),
            (
                "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                "013",
            ),
            (
                "{%- set ns = namespace(n=0) -%}{%- for i in [1,2] -%}{%- set ns.n = ns.n + i -%}{%- endfor -%}{{ ns.n }}",
                "3",
            ),
        ] {
            assert_eq!(render(source, empty.clone()), text, "{source}");
        }
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let source = "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}";
        let error = template(source).render_json(&json!({"messages": []}), false).expect_err("fuel");
        assert!(error.contains("fuel") || error.contains("work"), "{error}");
    }

    #[test]
    fn a_value_whose_text_would_fill_the_memory_is_stopped_before_it_is_written() {
        let doubled =
            "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
        let text = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
        let deep = "{% set ns = namespace(x=[]) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}{% endfor %}";
        for (made, written) in [
            (doubled, "{{ ns.x }}"),
            (doubled, "{{ ns.x | tojson }}"),
            (text, "{{ ns.x }}"),
            (deep, "{{ ns.x }}"),
            (deep, "{{ ns.x | tojson }}"),
        ] {
            let source = format!("{made}{written}");
            let error = template(&source).render_json(&json!({"messages": []}), false).expect_err(&source);
            assert!(error.contains("work") || error.contains("deep") || error.contains("fuel"), "{written}: {error}");
        }
    }

    #[test]
    fn values_nested_as_deep_as_fuel_allows_do_no_harm() {
        let deep = "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}";
        for end in ["", "{{ ns.x == [ns.x] }}"] {
            let source = format!("{}{end}", deep.repeat(2));
            match template(&source).render_json(&json!({"messages": []}), false) {
                Ok(rendered) => assert!(rendered.text.len() < 10, "{end}"),
                Err(error) => assert!(error.contains("work") || error.contains("deep"), "{end}: {error}"),
            }
        }
    }

    #[test]
    fn raise_exception_is_told() {
        let error = template("{{ raise_exception('roles must alternate') }}")
            .render_json(&json!({"messages": []}), false)
            .expect_err("raised");
        assert!(error.starts_with("roles must alternate"), "{error}");
    }
}
