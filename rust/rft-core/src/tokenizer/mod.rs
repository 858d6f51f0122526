//! tokenizer.json as the data path uses it: ids with byte ranges, and control tokens told apart from their spelling.
//!
//! The engine is the `tokenizers` crate, which the Python wheel wraps, so ids equal those of `transformers`. Only its
//! single-text calls are used: they hold no pool of threads that a fork could break.

mod control;

use tokenizers::tokenizer::normalizer::Range as OffsetRange;
use tokenizers::tokenizer::{
    AddedVocabulary, Encoding, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, Token,
};

use crate::error::{Error, Kind, Result};
use crate::template::MARK;

pub use control::ControlTokens;

/// Ids of a text, and the bytes of it that each covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Byte range of each token in the text.
    pub offsets: Vec<(usize, usize)>,
}

/// A loaded tokenizer. Shared by threads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The added tokens, special ones left unmatched.
    plain: AddedVocabulary,
    control: ControlTokens,
    byte_level: bool,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn failed(error: Failure) -> Error {
    Error::new(Kind::Tokenizer, "tokenizer.json", format!("the tokenizer fails: {error}"))
}

impl Tokenizer {
    /// Loads the text of a tokenizer.json; its post-processor, truncation and padding are left out.
    pub fn new(json: &str) -> Result<Tokenizer> {
        let broken = |e: Failure| {
            Error::new(Kind::Tokenizer, "tokenizer.json", format!("cannot be read: {e}"))
                .wanted("a tokenizer.json of the tokenizers library")
        };
        let mut inner: tokenizers::Tokenizer = json.parse().map_err(broken)?;
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        let mut plain = inner.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        let special: Vec<(String, u32)> = inner
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, token)| token.special && !token.content.is_empty())
            .map(|(id, token)| (token.content.clone(), *id))
            .collect();
        let control = ControlTokens::new(special)?;
        let byte_level = matches!(inner.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_)));
        Ok(Tokenizer { inner, plain, control, byte_level })
    }

    /// The control tokens: the added tokens that are marked special.
    pub fn control(&self) -> &ControlTokens {
        &self.control
    }

    /// Ids of a text in which added tokens are recognised; nothing is put before or behind.
    pub fn encode(&self, text: &str) -> Result<Encoded> {
        let pieces = self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text);
        self.finish(pieces)
    }

    /// Ids of ordinary text: control tokens spelled in it stay text.
    ///
    /// # Errors
    /// Where the vocabulary itself makes a control token of its spelling.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        let pieces = self.plain.extract_and_normalize(self.inner.get_normalizer(), text);
        let ids = self.tokenise(pieces, OffsetType::None)?.get_ids().to_vec();
        self.refuse_control(&ids, &[], text)?;
        Ok(ids)
    }

    /// Ids of a rendered chat with marks behind the first character of each control token that a row spelled:
    /// those stay text, the others are recognised. The ranges are those of the text without marks ([`Unmarked`]).
    ///
    /// # Errors
    /// Where the vocabulary itself makes a control token of its spelling.
    pub fn encode_marked(&self, marked: &str, clean: &Unmarked) -> Result<Encoded> {
        if clean.marks.is_empty() {
            return self.encode(marked);
        }
        // The added tokens of the marked text are exactly those that the template wrote: a mark lies inside all others.
        let found = self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), marked);
        let mut real = Vec::new();
        for (_, (start, end), tokens) in found.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            if let Some([token]) = tokens.as_deref() {
                real.push((clean.position(start), clean.position(end), token.id));
            }
        }
        let mut pieces = PreTokenizedString::from(clean.text.as_str());
        pieces.split(|_, whole| Ok(cut(&whole, &real))).map_err(failed)?;
        if let Some(normalizer) = self.inner.get_normalizer() {
            pieces.normalize(|piece| normalizer.normalize(piece)).map_err(failed)?;
        }
        let encoded = self.finish(pieces)?;
        let written: Vec<u32> = real.iter().map(|(_, _, id)| *id).collect();
        self.refuse_control(&encoded.ids, &written, &clean.text)?;
        Ok(encoded)
    }

    /// Fails where the text spells a control token more often than the template wrote it (`written`), and the
    /// vocabulary made that token of it. An unknown-token id for other text is none.
    fn refuse_control(&self, ids: &[u32], written: &[u32], text: &str) -> Result<()> {
        let count = |list: &[u32], id: u32| list.iter().filter(|other| **other == id).count();
        for id in ids.iter().copied().filter(|id| self.control.is_control(*id)) {
            let allowed = count(written, id);
            let token = self.inner.id_to_token(id).unwrap_or_default();
            if count(ids, id) > allowed && !token.is_empty() && text.matches(&token).count() > allowed {
                let problem =
                    format!("{token:?} is spelled in the text, and this tokenizer has no other way to write it");
                return Err(Error::new(Kind::Tokenizer, "", problem));
            }
        }
        Ok(())
    }

    fn finish(&self, pieces: PreTokenizedString) -> Result<Encoded> {
        let encoding = self.tokenise(pieces, OffsetType::Byte)?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    fn tokenise(&self, mut pieces: PreTokenizedString, offsets: OffsetType) -> Result<Encoding> {
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        let model = self.inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get())).map_err(failed)?;
        pieces.into_encoding(None, 0, offsets).map_err(failed)
    }

    /// The text of ids, control tokens included.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(failed)
    }

    /// Each id's own text, for display. Bytes that are no UTF-8 alone become U+FFFD.
    pub fn tokens(&self, ids: &[u32]) -> Result<Vec<String>> {
        ids.iter().map(|id| self.token(*id)).collect()
    }

    fn token(&self, id: u32) -> Result<String> {
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

/// A text without its marks, and how places in it follow from places in the marked one.
pub struct Unmarked {
    /// The text without marks.
    pub text: String,
    marks: Vec<usize>,
}

impl Unmarked {
    /// Takes the marks out.
    pub fn new(marked: &str) -> Unmarked {
        Unmarked { text: marked.replace(MARK, ""), marks: marked.match_indices(MARK).map(|(at, _)| at).collect() }
    }

    /// Where a byte position of the marked text lies in the clean one.
    pub fn position(&self, marked: usize) -> usize {
        marked - MARK.len_utf8() * self.marks.partition_point(|mark| *mark < marked)
    }
}
