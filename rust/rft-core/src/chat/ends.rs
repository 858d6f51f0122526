//! The control token that ends a turn: into a span, or out of it.

use crate::tokenizer::ControlTokens;

impl ControlTokens {
    /// Behind the control token that follows `text[start..end]` at once; `end` where none does, or where the span ends with
    /// one already.
    pub(super) fn end_behind(&self, text: &str, start: usize, end: usize) -> usize {
        if self.without_end(text, start, end) < end {
            return end;
        }
        let found = self.texts().iter().filter(|token| text[end..].starts_with(token.as_str())).map(String::len).max();
        found.map_or(end, |length| end + length)
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
