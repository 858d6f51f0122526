//! The `tokenizers` crate: the reference, and the engine of what the fast one does not know.
//!
//! Only its single-text calls are used: they hold no pool of threads that a fork could break.

use tokenizers::tokenizer::normalizer::Range as OffsetRange;
use tokenizers::tokenizer::{
    AddedVocabulary, Encoding, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, Token,
};

use super::Encoded;
use super::model::Added;
use crate::error::{Error, Kind, Result};

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn failed(error: Failure) -> Error {
    Error::new(Kind::Tokenizer, "tokenizer.json", format!("the tokenizer fails: {error}"))
}

/// The library's tokenizer.
pub struct Slow {
    inner: tokenizers::Tokenizer,
    /// The added tokens, special ones left unmatched.
    plain: AddedVocabulary,
    byte_level: bool,
}

impl Slow {
    /// Loads the text of a tokenizer.json; its post-processor, truncation and padding are left out.
    pub fn new(json: &str) -> Result<Slow> {
        let broken = |e: Failure| {
            Error::new(Kind::Tokenizer, "tokenizer.json", format!("cannot be read: {e}"))
                .wanted("a tokenizer.json of the tokenizers library")
        };
        // The library panics on some files that are no valid JSON or lack a part.
        let parsed = std::panic::catch_unwind(|| json.parse::<tokenizers::Tokenizer>());
        let mut inner = parsed.unwrap_or_else(|_| Err("it contradicts itself".into())).map_err(broken)?;
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        let mut plain = inner.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        let byte_level = matches!(inner.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_)));
        Ok(Slow { inner, plain, byte_level })
    }

    /// The added tokens, with the ids that the library gives them, by id.
    pub fn added(&self) -> Vec<Added> {
        let mut added: Vec<Added> = self
            .inner
            .get_added_tokens_decoder()
            .iter()
            .map(|(id, token)| Added {
                id: *id,
                content: token.content.clone(),
                single_word: token.single_word,
                lstrip: token.lstrip,
                rstrip: token.rstrip,
                normalized: token.normalized,
                special: token.special,
            })
            .collect();
        added.sort_unstable_by_key(|token| token.id);
        added
    }

    /// The largest id.
    pub fn top_id(&self) -> u32 {
        self.inner.get_vocab(true).into_values().max().unwrap_or(0)
    }

    /// The text of a token in the vocabulary.
    pub fn spelling(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Ids and places of a text in which added tokens are recognised.
    pub fn encode(&self, text: &str) -> Result<Encoded> {
        let pieces = self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text);
        self.finish(pieces)
    }

    /// Ids and places of a text in which special tokens stay text.
    pub fn encode_text(&self, text: &str) -> Result<Encoded> {
        self.finish(self.plain.extract_and_normalize(self.inner.get_normalizer(), text))
    }

    /// The added tokens of a text: (start, end, id).
    pub fn find_added(&self, text: &str) -> Vec<(usize, usize, u32)> {
        let found = self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text);
        let splits = found.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits
            .into_iter()
            .filter_map(|(_, (start, end), tokens)| match tokens.as_deref() {
                Some([token]) => Some((start, end, token.id)),
                _ => None,
            })
            .collect()
    }

    /// Ids and places of a text whose added tokens are given.
    pub fn encode_cut(&self, text: &str, tokens: &[(usize, usize, u32)]) -> Result<Encoded> {
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, whole| Ok(cut(&whole, tokens))).map_err(failed)?;
        if let Some(normalizer) = self.inner.get_normalizer() {
            pieces.normalize(|piece| normalizer.normalize(piece)).map_err(failed)?;
        }
        self.finish(pieces)
    }

    fn finish(&self, pieces: PreTokenizedString) -> Result<Encoded> {
        let encoding = self.tokenise(pieces)?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    fn tokenise(&self, mut pieces: PreTokenizedString) -> Result<Encoding> {
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        let model = self.inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get())).map_err(failed)?;
        pieces.into_encoding(None, 0, OffsetType::Byte).map_err(failed)
    }

    /// The text of ids, control tokens included.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(failed)
    }

    /// An id's own text, for display.
    pub fn token(&self, id: u32) -> Result<String> {
        if self.byte_level || self.inner.get_added_vocabulary().simple_id_to_token(id).is_some() {
            return self.decode(&[id]);
        }
        let Some(token) = self.inner.id_to_token(id) else {
            return Ok(String::new());
        };
        // SentencePiece: a decoder would take the leading space away, and a byte alone is no text.
        if token.len() == 6 && token.starts_with("<0x") && token.ends_with('>') {
            let byte = u8::from_str_radix(&token[3..5], 16).unwrap_or(b'?');
            return Ok(String::from_utf8_lossy(&[byte]).into_owned());
        }
        Ok(token.replace('\u{2581}', " "))
    }
}

/// Cuts a whole text at the added tokens found in it.
fn cut(whole: &NormalizedString, real: &[(usize, usize, u32)]) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    let (mut pieces, mut at) = (Vec::with_capacity(2 * real.len() + 1), 0);
    let end = whole.get_original().len();
    let piece = |start: usize, end: usize| whole.slice(OffsetRange::Original(start..end));
    for &(start, stop, id) in real {
        if at < start {
            pieces.extend(piece(at, start).map(|text| (text, None)));
        }
        pieces.extend(piece(start, stop).map(|text| {
            let value = text.get().to_string();
            let length = value.len();
            (text, Some(vec![Token::new(id, value, (0, length))]))
        }));
        at = stop;
    }
    if at < end {
        pieces.extend(piece(at, end).map(|text| (text, None)));
    }
    pieces
}
