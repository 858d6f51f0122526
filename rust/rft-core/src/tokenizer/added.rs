//! Added tokens: where a text holds them.

use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, MatchKind};
use regex::Regex;

use super::model::Added;
use super::trie::{NONE, Trie};
use crate::error::{Error, Kind, Result};

/// Finds the added tokens of one kind: those looked for before normalisation, or those after it.
pub struct Finder {
    tokens: Vec<Added>,
    search: Search,
}

enum Search {
    None,
    /// All start with one byte, `<` as a rule, and go on with one of a few.
    Lead(Box<Lead>),
    Any(Box<AhoCorasick>),
}

struct Lead {
    first: u8,
    seconds: [bool; 256],
    trie: Trie,
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
        let search = match tokens.first().and_then(|(_, text)| text.as_bytes().first().copied()) {
            None if tokens.is_empty() => Search::None,
            Some(first) if tokens.iter().all(|(_, text)| text.len() > 1 && text.as_bytes()[0] == first) => {
                let mut sorted: Vec<(&[u8], u32)> = tokens.iter().map(|(_, text)| text.as_bytes()).zip(0..).collect();
                // Of equal ones the first counts, as in the other search.
                sorted.sort_unstable();
                sorted.dedup_by_key(|(text, _)| *text);
                let mut seconds = [false; 256];
                sorted.iter().for_each(|(text, _)| seconds[usize::from(text[1])] = true);
                Search::Lead(Box::new(Lead { first, seconds, trie: Trie::new(&sorted) }))
            }
            _ => {
                let builder = AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(tokens.iter().map(|(_, text)| text));
                Search::Any(Box::new(builder.map_err(|e| Error::new(Kind::Tokenizer, "tokenizer.json", e))?))
            }
        };
        Ok(Finder { tokens: tokens.into_iter().map(|(token, _)| token).collect(), search })
    }

    /// Whether there is nothing to find.
    pub fn is_empty(&self) -> bool {
        matches!(self.search, Search::None)
    }

    /// Gives all matches, leftmost and longest, that do not overlap: number, start, end.
    fn find(&self, text: &str, each: &mut dyn FnMut(usize, usize, usize)) {
        match &self.search {
            Search::None => {}
            Search::Any(search) => {
                for found in search.find_iter(text) {
                    each(found.pattern().as_usize(), found.start(), found.end());
                }
            }
            Search::Lead(lead) => {
                let (text, mut at) = (text.as_bytes(), 0);
                while let Some(skipped) = memchr::memchr(lead.first, &text[at..]) {
                    let start = at + skipped;
                    at = start + 1;
                    if !text.get(at).is_some_and(|second| lead.seconds[usize::from(*second)]) {
                        continue;
                    }
                    let (index, length) = lead.trie.longest_with_length(&text[start..]);
                    if index != NONE {
                        at = start + length;
                        each(index as usize, start, at);
                    }
                }
            }
        }
    }

    /// Cuts a text at its added tokens, without special ones where `text_only`. Follows the `tokenizers` crate: of
    /// matches that overlap the leftmost and longest counts, also where it is then left as text.
    pub fn cut(&self, text: &str, text_only: bool, each: &mut dyn FnMut(Stretch)) {
        let mut done = 0;
        self.find(text, &mut |index, mut start, mut end| {
            let token = &self.tokens[index];
            if text_only && token.special {
                return;
            }
            if token.single_word && (ends_in_word(&text[..start]) || starts_in_word(&text[end..])) {
                return;
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
        });
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
