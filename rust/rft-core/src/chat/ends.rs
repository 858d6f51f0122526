//! The control token that ends a turn: into a span, or out of it.

use crate::tokenizer::ControlTokens;

impl ControlTokens {
    /// Behind the control token that starts at `at`, white space before it let be; `at` where none does.
    pub(super) fn end_behind(&self, text: &str, at: usize) -> usize {
        let start = at + text[at..].len() - text[at..].trim_start().len();
        let found =
            self.texts().iter().filter(|token| text[start..].starts_with(token.as_str())).map(String::len).max();
        found.map_or(at, |length| start + length)
    }

    /// The end of what stands before the control tokens that end `text[start..end]`.
    pub(super) fn without_end(&self, text: &str, start: usize, end: usize) -> usize {
        let mut at = end;
        loop {
            let visible = start + text[start..at].trim_end().len();
            let inside = &text[start..visible];
            match self.texts().iter().filter(|token| inside.ends_with(token.as_str())).map(String::len).max() {
                Some(length) => at = visible - length,
                None => return if at == end { end } else { at },
            }
        }
    }
}
