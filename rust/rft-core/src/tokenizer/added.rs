//! Added tokens: where a text holds them.

use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, MatchKind};
use regex::Regex;

use super::model::Added;
use crate::error::{Error, Kind, Result};

/// Finds the added tokens of one kind: those looked for before normalisation, or those after it.
pub struct Finder {
    tokens: Vec<Added>,
    search: Option<AhoCorasick>,
}

/// A stretch of a text: an added token by its id, or text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The id of an added token.
    pub id: Option<u32>,
    /// Its first byte.
    pub start: usize,
    /// Behind its last byte.
    pub end: usize,
}

impl Finder {
    /// From tokens and the texts to look for.
    pub fn new(tokens: Vec<(Added, String)>) -> Result<Finder> {
        let search = (!tokens.is_empty())
            .then(|| {
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(tokens.iter().map(|(_, text)| text))
                    .map_err(|e| Error::new(Kind::Tokenizer, "tokenizer.json", e))
            })
            .transpose()?;
        Ok(Finder { tokens: tokens.into_iter().map(|(token, _)| token).collect(), search })
    }

    /// Whether there is nothing to find.
    pub fn is_empty(&self) -> bool {
        self.search.is_none()
    }

    /// Cuts a text at its added tokens, without special ones where `text_only`. Follows the `tokenizers` crate: of
    /// matches that overlap the leftmost and longest counts, also where it is then left as text.
    pub fn cut(&self, text: &str, text_only: bool, each: &mut dyn FnMut(Stretch)) {
        let mut done = 0;
        for found in self.search.iter().flat_map(|search| search.find_iter(text)) {
            let token = &self.tokens[found.pattern().as_usize()];
            let (mut start, mut end) = (found.start(), found.end());
            if text_only && token.special {
                continue;
            }
            if token.single_word && (ends_in_word(&text[..start]) || starts_in_word(&text[end..])) {
                continue;
            }
            if token.lstrip {
                start = text[..start].trim_end().len().max(done);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start {
                each(Stretch { id: None, start: done, end: start });
            }
            each(Stretch { id: Some(token.id), start, end });
            done = end;
        }
        if done < text.len() {
            each(Stretch { id: None, start: done, end: text.len() });
        }
    }
}

// `\w` of the crate that the library asks.
static WORD: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^\w").ok());

fn starts_in_word(text: &str) -> bool {
    WORD.as_ref().is_some_and(|word| word.is_match(text))
}

fn ends_in_word(text: &str) -> bool {
    text.char_indices().next_back().is_some_and(|(at, _)| starts_in_word(&text[at..]))
}
