//! Control tokens that a row spells are broken by marks before a chat is rendered.

use std::borrow::Cow;

use serde_json::Value as Json;

use super::RowResult;
use crate::example::Chat;
use crate::row_error::RowError;
use crate::template::{CONTENT_EDGE, MARK, SPAN_END, SPAN_START};
use crate::tokenizer::ControlTokens;

/// Breaks control tokens spelled in a chat and refuses text that holds our own marks; whether a token was spelled.
pub fn neutralise(chat: &mut Chat, control: Option<&ControlTokens>) -> RowResult<bool> {
    let mut spelled = false;
    for (index, message) in chat.messages.iter_mut().enumerate() {
        for (name, value) in &mut message.fields {
            if name != "role" {
                walk(value, control, &mut spelled).map_err(|()| reserved(&format!("messages[{index}].{name}")))?;
            }
        }
    }
    for (name, value) in &mut chat.extra {
        walk(value, control, &mut spelled).map_err(|()| reserved(name))?;
    }
    Ok(spelled)
}

fn reserved(field: &str) -> RowError {
    RowError::bad(field, "it holds one of the noncharacters U+FDD0 to U+FDD3", "text without them")
        .remedy("take them out of the row: Unicode keeps them for programs' own use, and rft marks spans with them")
}

fn walk(value: &mut Json, control: Option<&ControlTokens>, spelled: &mut bool) -> std::result::Result<(), ()> {
    let mut text = |text: &str| -> std::result::Result<Option<String>, ()> {
        if text.contains([MARK, SPAN_START, SPAN_END, CONTENT_EDGE]) {
            return Err(());
        }
        let Some(control) = control else { return Ok(None) };
        *spelled |= control.is_spelled(text);
        match control.neutralise(text) {
            Cow::Borrowed(_) => Ok(None),
            Cow::Owned(marked) => Ok(Some(marked)),
        }
    };
    match value {
        Json::String(content) => {
            if let Some(marked) = text(content)? {
                *content = marked;
            }
        }
        Json::Array(items) => {
            for item in items {
                walk(item, control, spelled)?;
            }
        }
        Json::Object(fields) => {
            let mut renamed = Vec::new();
            for name in fields.keys() {
                if let Some(marked) = text(name)? {
                    renamed.push((name.clone(), marked));
                }
            }
            if !renamed.is_empty() {
                let old = std::mem::take(fields);
                for (name, value) in old {
                    let new = renamed.iter().find(|(from, _)| *from == name).map(|(_, to)| to.clone());
                    fields.insert(new.unwrap_or(name), value);
                }
            }
            for value in fields.values_mut() {
                walk(value, control, spelled)?;
            }
        }
        _ => {}
    }
    Ok(())
}
