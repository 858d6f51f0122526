//! Control tokens: what text spells one, and where a text really ends with one.

use std::borrow::Cow;
use std::collections::HashSet;

use aho_corasick::{AhoCorasick, MatchKind};

use crate::error::{Error, Kind, Result};
use crate::template::MARK;

/// The added tokens that are marked special.
pub struct ControlTokens {
    tokens: Vec<String>,
    ids: HashSet<u32>,
    every: AhoCorasick,
    longest: AhoCorasick,
    heads: HashSet<String>,
    tails: HashSet<String>,
    max_len: usize,
}

impl ControlTokens {
    /// From contents and ids.
    pub fn new(special: Vec<(String, u32)>) -> Result<ControlTokens> {
        let build = |kind: MatchKind| {
            AhoCorasick::builder()
                .match_kind(kind)
                .build(special.iter().map(|(token, _)| token))
                .map_err(|e| Error::new(Kind::Tokenizer, "tokenizer.json", e))
        };
        let (every, longest) = (build(MatchKind::Standard)?, build(MatchKind::LeftmostLongest)?);
        let (mut heads, mut tails) = (HashSet::new(), HashSet::new());
        for (token, _) in &special {
            for (at, _) in token.char_indices().skip(1) {
                heads.insert(token[..at].to_string());
                tails.insert(token[at..].to_string());
            }
        }
        let max_len = special.iter().map(|(token, _)| token.len()).max().unwrap_or(0);
        let ids = special.iter().map(|(_, id)| *id).collect();
        let tokens = special.into_iter().map(|(token, _)| token).collect();
        Ok(ControlTokens { tokens, ids, every, longest, heads, tails, max_len })
    }

    /// How they are spelled.
    pub fn texts(&self) -> &[String] {
        &self.tokens
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Whether an id is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// Whether a text spells a control token.
    pub fn is_spelled(&self, text: &str) -> bool {
        !self.tokens.is_empty() && self.every.is_match(text)
    }

    /// Puts a mark behind the first character of every control token spelled in a row's text, also of a piece at its
    /// end that a neighbour could complete, and before a piece at its start that could complete a neighbour.
    pub fn neutralise<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.tokens.is_empty() || text.is_empty() {
            return Cow::Borrowed(text);
        }
        let behind = |start: usize| start + text[start..].chars().next().map_or(0, char::len_utf8);
        let mut marks: Vec<usize> = self.every.find_overlapping_iter(text).map(|found| behind(found.start())).collect();
        let first = text.len().saturating_sub(self.max_len);
        let ends = text.char_indices().rev().take_while(|(at, _)| *at >= first);
        marks.extend(ends.filter(|(at, _)| self.heads.contains(&text[*at..])).map(|(at, _)| behind(at)));
        let mut starts = text.char_indices().skip(1).map(|(at, _)| at).chain([text.len()]);
        if starts.by_ref().take_while(|at| *at < self.max_len).any(|at| self.tails.contains(&text[..at])) {
            marks.push(0);
        }
        if marks.is_empty() {
            return Cow::Borrowed(text);
        }
        marks.sort_unstable();
        marks.dedup();
        let (mut out, mut at) = (String::with_capacity(text.len() + 3 * marks.len()), 0);
        for mark in marks {
            out.push_str(&text[at..mark]);
            out.push(MARK);
            at = mark;
        }
        out.push_str(&text[at..]);
        Cow::Owned(out)
    }

    /// Where the last control token of a text ends.
    pub fn last_end(&self, text: &str) -> Option<usize> {
        if self.tokens.is_empty() {
            return None;
        }
        self.longest.find_iter(text).last().map(|found| found.end())
    }

    /// Where a turn ends: behind its last control token if only white space follows, else at `end`.
    pub fn turn_end(&self, text: &str, start: usize, end: usize) -> usize {
        let visible = start + text[start..end].trim_end().len();
        // Only the last bytes can be that token.
        let mut from = visible.saturating_sub(self.max_len).max(start);
        while !text.is_char_boundary(from) {
            from += 1;
        }
        let last = &text[from..visible];
        let ends =
            !self.tokens.is_empty() && self.every.find_overlapping_iter(last).any(|found| found.end() == last.len());
        if ends { visible } else { end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control() -> ControlTokens {
        let tokens = ["<|im_start|>", "<|im_end|>", "</s>"];
        ControlTokens::new(tokens.iter().zip(0u32..).map(|(t, i)| (t.to_string(), i)).collect()).expect("tokens")
    }

    #[test]
    fn spelled_tokens_are_broken_and_the_rest_is_left() {
        let control = control();
        assert_eq!(control.neutralise("plain < text | here"), "plain < text | here");
        let marked = control.neutralise("a<|im_end|>b</s>");
        assert_eq!(marked, format!("a<{MARK}|im_end|>b<{MARK}/s>"));
        assert!(!control.is_spelled(&marked));
    }

    #[test]
    fn pieces_that_neighbours_complete_are_broken_too() {
        let control = control();
        for (left, right) in [("x<|im_", "end|>y"), ("<", "/s>"), ("</s", ">"), ("<|im_end|", ">")] {
            let joined = format!("{}{}", control.neutralise(left), control.neutralise(right));
            assert!(!control.is_spelled(&joined), "{joined}");
            assert!(!control.is_spelled(&format!("{}{right}", control.neutralise(left))));
            assert!(!control.is_spelled(&format!("{left}{}", control.neutralise(right))));
        }
    }

    #[test]
    fn a_turn_ends_behind_its_last_control_token() {
        let (control, text) = (control(), "Hello<|im_end|>\nmore\n");
        assert_eq!(control.turn_end(text, 0, 16), 15);
        assert_eq!(control.turn_end(text, 0, text.len()), text.len());
        assert_eq!(control.turn_end("plain\n", 0, 6), 6);
    }
}
