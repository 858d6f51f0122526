//! Who says what in a rendered chat: for the counts of tokens by role, and for nothing else.
//!
//! What a message says is its reasoning, its content, and the names and arguments of its tool calls, each where the text
//! holds it as it is, behind what was found before; white space at its edges is said where it is written, and content of
//! white space alone is not looked for. All else in the text is the template's.

use std::borrow::Cow;

use serde_json::Value as Json;

use crate::chat::reasoning_of;
use crate::example::{Chat, Message, ROLES};
use crate::pytext::{JsonStyle, json_dumps};
use crate::template::to_value;

/// A part of a text that a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// First byte.
    pub start: usize,
    /// Behind the last byte.
    pub end: usize,
    /// As in [`ROLES`].
    pub role: u8,
}

/// Tokens by role, as in [`ROLES`].
pub type ByRole = [u64; ROLES.len()];

/// Bytes of arguments beyond which they are not looked for.
const MOST_ARGUMENTS: usize = 1 << 20;
/// Places that are tried before a finder is made: the text before a content is a few words of the template's.
const NEAR: usize = 128;

/// Where the contents of a plain chat are in its text, in order.
pub fn contents<'a>(text: &str, roles: &[u8], content: impl Fn(usize) -> &'a str, out: &mut Vec<Said>) {
    out.clear();
    let mut at = 0;
    for (index, role) in roles.iter().enumerate() {
        at = find(text, at, content(index), *role, out).unwrap_or(at);
    }
}

/// The same for any chat.
pub fn in_chat(text: &str, chat: &Chat) -> Vec<Said> {
    let (mut out, mut at) = (Vec::new(), 0);
    for message in &chat.messages {
        let Some(role) = ROLES.iter().position(|role| *role == message.role) else { continue };
        let mut look = |words: &str, out: &mut Vec<Said>| {
            let found = find(text, at, words, role as u8, out);
            at = found.unwrap_or(at);
            found.is_some()
        };
        let reasoning = reasoning_of(message);
        let texts = texts_of(message);
        let inline = reasoning.is_some_and(|words| texts.iter().any(|text| text.contains(words)));
        if let Some(words) = reasoning.filter(|_| !inline) {
            look(words, &mut out);
        }
        for content in texts {
            if look(content, &mut out) {
                continue;
            }
            // Reasoning in a content is often written in another way, or not at all.
            if let Some((_, rest)) = reasoning.and_then(|words| content.split_once(words)) {
                look(reasoning.unwrap_or_default(), &mut out);
                let answer = rest.find(['>', ']']).map_or(rest, |close| &rest[close + 1..]);
                look(answer, &mut out);
            }
        }
        for words in calls_of(message) {
            look(&words, &mut out);
        }
    }
    out
}

fn texts_of(message: &Message) -> Vec<&str> {
    match message.fields.get("content") {
        Some(Json::String(text)) => vec![text],
        Some(Json::Array(parts)) => parts.iter().filter_map(|part| part.get("text")?.as_str()).collect(),
        _ => Vec::new(),
    }
}

/// Names and arguments of tool calls, as templates write them.
fn calls_of(message: &Message) -> Vec<Cow<'_, str>> {
    let calls = message.fields.get("tool_calls").and_then(Json::as_array);
    let parts = calls.into_iter().flatten().flat_map(|call| {
        let call = call.get("function").unwrap_or(call);
        let name = call.get("name").and_then(Json::as_str).map(Cow::Borrowed);
        let arguments = call.get("arguments").and_then(|arguments| match arguments {
            Json::String(text) => Some(Cow::Borrowed(text.as_str())),
            other => json_dumps(&to_value(other), &JsonStyle::default(), MOST_ARGUMENTS).ok().map(Cow::Owned),
        });
        [name, arguments]
    });
    parts.flatten().collect()
}

/// The first place from `at` on where the visible part of `words` stands, with the white space at its edges where the text
/// has that too; its end.
fn find(text: &str, at: usize, all: &str, role: u8, out: &mut Vec<Said>) -> Option<usize> {
    let words = all.trim();
    let first = *words.as_bytes().first()?;
    let rest = &text.as_bytes()[at..];
    let near = memchr::memchr_iter(first, &rest[..rest.len().min(NEAR)]);
    let found = near.into_iter().find(|offset| rest[*offset..].starts_with(words.as_bytes()));
    let offset = match found {
        Some(offset) => offset,
        None => memchr::memmem::find(rest, words.as_bytes())?,
    };
    let (mut start, mut end) = (at + offset, at + offset + words.len());
    if words.len() < all.len() {
        let (before, after) = (&all[..all.len() - all.trim_start().len()], &all[all.trim_end().len()..]);
        if text[at..start].ends_with(before) {
            start -= before.len();
        }
        if text[end..].starts_with(after) {
            end += after.len();
        }
    }
    out.push(Said { start, end, role });
    Some(end)
}

/// Tokens of each role: those that overlap its parts, as those that overlap a trained span are trained on. `range`: the bytes
/// of a token; neither starts nor ends decrease.
pub fn count(said: &[Said], num_tokens: usize, range: impl Fn(usize) -> (usize, usize)) -> ByRole {
    // The first token from `from` on for which this holds, as it does for all behind it.
    let first = |from: usize, holds: &dyn Fn((usize, usize)) -> bool| {
        let (mut low, mut high) = (from, num_tokens);
        while low < high {
            let middle = usize::midpoint(low, high);
            if holds(range(middle)) { high = middle } else { low = middle + 1 }
        }
        low
    };
    let (mut by_role, mut from) = (ByRole::default(), 0);
    for part in said {
        let begin = first(from, &|(_, end)| end > part.start);
        from = first(begin, &|(start, _)| start >= part.end);
        by_role[usize::from(part.role)] += (from - begin) as u64;
    }
    by_role
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn words(text: &str, said: &[Said]) -> Vec<(&'static str, String)> {
        said.iter().map(|part| (ROLES[usize::from(part.role)], text[part.start..part.end].to_string())).collect()
    }

    #[test]
    fn contents_are_found_in_order_and_the_rest_is_the_templates() {
        let text = "<u> user </u><a>user too</a>";
        let mut said = Vec::new();
        contents(text, &[2, 3], |index| [" user ", "user too"][index], &mut said);
        assert_eq!(words(text, &said), [("user", " user ".into()), ("assistant", "user too".into())]);
        // A template that trims: what stands there is what is said. White space before it may belong to what came before.
        contents(text, &[2, 3], |index| ["user\n", " user too\n"][index], &mut said);
        assert_eq!(words(text, &said), [("user", "user".into()), ("assistant", "user too".into())]);
        // What the template changed is not found, and hides nothing behind it.
        contents(text, &[0, 2, 3], |index| ["Be kind.", "user", "user too"][index], &mut said);
        assert_eq!(words(text, &said).len(), 2);
    }

    #[test]
    fn reasoning_and_calls_belong_to_who_says_them() {
        let chat: Json = serde_json::json!([
            {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the time?"}]},
            {"role": "assistant", "content": "<think>clock</think>Let me see.",
             "tool_calls": [{"function": {"name": "now", "arguments": {"zone": "UTC"}}}]},
            {"role": "tool", "content": "12:00"},
        ]);
        let messages = chat.as_array().unwrap().iter();
        let messages = messages.map(|fields| Message {
            role: ROLES.into_iter().find(|role| fields["role"] == *role).unwrap().into(),
            fields: fields.as_object().unwrap().clone(),
            weight: 1.0,
            train: None,
        });
        let chat = Chat { messages: messages.collect(), extra: serde_json::Map::new() };
        let text =
            "U:What is|the time?|A:[clock]Let me see.{\"name\": \"now\", \"arguments\": {\"zone\": \"UTC\"}}|T:12:00|";
        let said = in_chat(text, &chat);
        let told: Vec<String> =
            words(text, &said).into_iter().map(|(role, words)| format!("{role}: {words}")).collect();
        assert_eq!(
            told,
            [
                "user: What is",
                "user: the time?",
                "assistant: clock",
                "assistant: Let me see.",
                "assistant: now",
                "assistant: {\"zone\": \"UTC\"}",
                "tool: 12:00",
            ]
        );
    }

    #[test]
    fn a_token_counts_for_who_says_any_of_it_and_once() {
        let said = [Said { start: 3, end: 6, role: 0 }, Said { start: 6, end: 8, role: 2 }];
        let ends = [2, 3, 5, 7, 8, 9];
        let by_role =
            count(&said, ends.len(), |index| (index.checked_sub(1).map_or(0, |before| ends[before]), ends[index]));
        // 3..5 and 5..7 (which the second part shares) for the first, 7..8 for the second.
        assert_eq!(by_role, [2, 0, 1, 0, 0]);
    }
}
