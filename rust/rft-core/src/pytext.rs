//! Values written as Python writes them: `json.dumps`, `repr` and floats. Chat templates are made against these.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// A float as Python's `repr` writes it: shortest digits, exponent below 1e-4 and from 1e16 on.
pub fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x < 0.0 { "-inf".into() } else { "inf".into() };
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Containers in containers that are written; deeper ones would need a stack without end.
const DEEPEST: usize = 200;

/// What a part of a value costs beside its bytes.
const PART: usize = 256;

/// Pays for a part of a value with so many bytes. Values may share parts, so that few steps make one whose text no memory
/// holds.
fn pay(left: &mut usize, bytes: usize) -> Result<(), Error> {
    *left = left
        .checked_sub(PART + bytes)
        .ok_or_else(|| Error::new(ErrorKind::OutOfFuel, "a value is too large to be written as text"))?;
    Ok(())
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply to be written as text")
}

/// A value as Python's `str` writes it: containers and floats; the rest as minijinja does. `most` bounds
/// bytes and parts.
pub fn str_of(value: &Value, mut most: usize) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => repr(&mut out, value, &mut most, 0)?,
        _ => out = plain(value),
    }
    Ok(out)
}

/// What is no container and no string.
fn plain(value: &Value) -> String {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(x) => float_repr(x),
            Err(_) => value.to_string(),
        },
        _ => value.to_string(),
    }
}

fn repr(out: &mut String, value: &Value, left: &mut usize, depth: usize) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(too_deep());
    }
    pay(left, value.as_str().map_or(0, str::len))?;
    match value.kind() {
        ValueKind::String => repr_str(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                if count > 0 {
                    out.push_str(", ");
                }
                repr(out, &item, left, depth + 1)?;
                count += 1;
            }
            if count == 1 && value.is_tuple() {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                repr(out, &key, left, depth + 1)?;
                out.push_str(": ");
                repr(out, &value.get_item(&key).unwrap_or_default(), left, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&plain(value)),
    }
    Ok(())
}

fn repr_str(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) || c as u32 == 0xad => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// How `json.dumps` lays its text out.
#[derive(Clone, Debug)]
pub struct JsonStyle {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        JsonStyle {
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            sort_keys: false,
            ensure_ascii: false,
        }
    }
}

impl JsonStyle {
    /// The keyword arguments that `transformers` gives the `tojson` filter.
    pub fn from_kwargs(indent: Option<Value>, kwargs: &Kwargs) -> Result<JsonStyle, Error> {
        let mut style = JsonStyle::default();
        let indent = match indent {
            Some(indent) => Some(indent),
            None => kwargs.get::<Option<Value>>("indent")?,
        };
        match indent {
            Some(indent) if indent.kind() == ValueKind::String => style.indent = Some(indent.to_string()),
            Some(indent) if indent.is_integer() => {
                let width = usize::try_from(indent).unwrap_or(0).min(64);
                style.indent = Some(" ".repeat(width));
            }
            _ => {}
        }
        if style.indent.is_some() {
            style.item_separator = ",".into();
        }
        if let Some(pair) = kwargs.get::<Option<Value>>("separators")?
            && !pair.is_none()
        {
            style.item_separator = pair.get_item_by_index(0)?.to_string();
            style.key_separator = pair.get_item_by_index(1)?.to_string();
        }
        style.sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
        style.ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
        kwargs.assert_all_used()?;
        let words = [style.indent.as_deref().unwrap_or_default(), &style.item_separator, &style.key_separator];
        if words.iter().any(|word| word.len() > 64) {
            return Err(Error::new(ErrorKind::InvalidOperation, "an indent or separator of more than 64 bytes"));
        }
        Ok(style)
    }
}

/// `json.dumps(value)`; `most` bounds bytes and parts. Undefined values are an error, as in Python.
pub fn json_dumps(value: &Value, style: &JsonStyle, mut most: usize) -> Result<String, Error> {
    let mut out = String::new();
    dump(&mut out, value, style, &mut most, 0)?;
    Ok(out)
}

fn dump(out: &mut String, value: &Value, style: &JsonStyle, left: &mut usize, depth: usize) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(too_deep());
    }
    pay(left, value.as_str().map_or(0, str::len))?;
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
        ValueKind::Number => out.push_str(&json_float(value)),
        ValueKind::String => dump_str(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            dump_list(out, style, depth, ('[', ']'), items.len(), |out, index| {
                dump(out, &items[index], style, left, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter()? {
                let text = match key.kind() {
                    ValueKind::String => key.to_string(),
                    ValueKind::None => "null".into(),
                    ValueKind::Bool => key.is_true().to_string(),
                    ValueKind::Number if key.is_integer() => key.to_string(),
                    ValueKind::Number => json_float(&key),
                    kind => {
                        let problem = format!("keys must be strings for JSON, not {kind}");
                        return Err(Error::new(ErrorKind::InvalidOperation, problem));
                    }
                };
                pairs.push((text, value.get_item(&key)?));
            }
            if style.sort_keys {
                pairs.sort_by(|a, b| a.0.cmp(&b.0));
            }
            dump_list(out, style, depth, ('{', '}'), pairs.len(), |out, index| {
                let (key, value) = &pairs[index];
                pay(left, key.len())?;
                dump_str(out, key, style.ensure_ascii);
                out.push_str(&style.key_separator);
                dump(out, value, style, left, depth + 1)
            })?;
        }
        kind => {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("{kind} cannot be written as JSON")));
        }
    }
    Ok(())
}

fn dump_list(
    out: &mut String,
    style: &JsonStyle,
    depth: usize,
    (open, close): (char, char),
    count: usize,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    out.push(open);
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    };
    for index in 0..count {
        if index > 0 {
            out.push_str(&style.item_separator);
        }
        new_line(out, depth + 1);
        item(out, index)?;
    }
    if count > 0 {
        new_line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn json_float(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(x) if x.is_nan() => "NaN".into(),
        Ok(x) if x.is_infinite() => if x < 0.0 { "-Infinity" } else { "Infinity" }.into(),
        Ok(x) => float_repr(x),
        Err(_) => value.to_string(),
    }
}

fn dump_str(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c if ensure_ascii && !c.is_ascii() => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases = [
            (0.5, "0.5"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e22, "1e+22"),
            (123456789.123, "123456789.123"),
            (1e-300, "1e-300"),
        ];
        for (x, text) in cases {
            assert_eq!(float_repr(x), text);
        }
    }

    #[test]
    fn containers_are_written_as_python_writes_them() {
        let value = crate::template::to_value(&serde_json::json!({"a": [1, 2.5, true, null, "it's"], "b": {}}));
        assert_eq!(str_of(&value, 1 << 20).expect("text"), r#"{'a': [1, 2.5, True, None, "it's"], 'b': {}}"#);
    }

    #[test]
    fn json_is_that_of_python() {
        let value = crate::template::to_value(&serde_json::json!({"z": "<é\u{1}\"", "a": [1.0, []], "n": null}));
        let plain = json_dumps(&value, &JsonStyle::default(), 1 << 20).expect("json");
        assert_eq!(plain, "{\"z\": \"<é\\u0001\\\"\", \"a\": [1.0, []], \"n\": null}");
        let style = JsonStyle { indent: Some("  ".into()), item_separator: ",".into(), ..JsonStyle::default() };
        let wide = json_dumps(&value, &style, 1 << 20).expect("json");
        assert_eq!(wide, "{\n  \"z\": \"<é\\u0001\\\"\",\n  \"a\": [\n    1.0,\n    []\n  ],\n  \"n\": null\n}");
    }
}
