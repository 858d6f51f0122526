//! tokenizer.json as the data path uses it: ids with byte ranges, and control tokens told apart from their spelling.
//!
//! Two engines give the same ids. The fast one ([`engine`]) knows byte-level BPE with the split patterns of today's
//! models and SentencePiece-type BPE. The other is the `tokenizers` crate, which the Python wheel wraps, so ids equal
//! those of `transformers`. It loads beside the fast one, checks it on a stress text, and does the work itself where the
//! two differ or the fast one does not know the file; [`Tokenizer::engine`] says which and why.

mod added;
mod borders;
mod bpe;
mod bulk;
mod cache;
mod check;
mod control;
mod cut;
mod engine;
mod masks;
mod memory;
mod model;
mod names;
mod normal;
mod pairs;
mod rounds;
mod slow;
mod trie;
pub mod unicode;
mod walk;

use std::sync::{Mutex, OnceLock};
use std::thread::{Scope, ScopedJoinHandle};

use crate::error::{Error, Kind, Result};
use crate::template::MARK;

use engine::{Engine as Fast, Places, Sink};
use slow::Slow;

pub use bulk::{Documents, FileIds, Ids};
pub use control::ControlTokens;

/// Ids of a text, and the bytes of it that each covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Byte range of each token in the text: the whole characters that it is part of.
    pub offsets: Vec<(usize, usize)>,
}

/// Which engine turns text into ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Whether it is ours, 20 to 60 times as fast as the `tokenizers` crate.
    pub fast: bool,
    /// Why it is not, in words that follow "because"; empty where it is.
    pub reason: String,
}

/// A loaded tokenizer. Shared by threads.
pub struct Tokenizer {
    /// The file, until the library is needed to decode, or at all.
    json: String,
    slow: OnceLock<std::result::Result<Slow, Error>>,
    fast: std::result::Result<Box<Fast>, String>,
    control: ControlTokens,
    /// The largest id.
    top_id: u32,
    /// Scratches of calls that bring none. Only tried, never waited for: a fork may have left it locked.
    spare: Mutex<Vec<Scratch>>,
}

/// What one thread works with; reuse it for all texts of one tokenizer.
pub struct Scratch(Option<Box<engine::Scratch>>);

/// Scratches kept for calls that bring none.
const SPARE: usize = 4;

impl Tokenizer {
    /// Loads the text of a tokenizer.json on one thread; its post-processor, truncation and padding are left out.
    pub fn new(json: &str) -> Result<Tokenizer> {
        Tokenizer::load(json, unicode::Version::default(), 1)
    }

    /// The same with a version of the Unicode tables of split patterns, and on up to three threads.
    ///
    /// The self-check is against the linked `tokenizers` crate, whose tables are 16: texts of the check hold no character
    /// that the versions tell apart, so it says the same for both.
    ///
    /// # Errors
    /// Other tables than the crate's for a file that is left to the crate.
    pub fn load(json: &str, version: unicode::Version, threads: usize) -> Result<Tokenizer> {
        let made = model::Plan::read(json).and_then(|plan| {
            let added = plan.added.clone();
            let ids = plan.model.vocab.0.iter().map(|(_, id)| *id).chain(added.iter().map(|token| token.id));
            let top_id = ids.max().unwrap_or(0);
            std::thread::scope(|scope| {
                let wanted = Side::new(scope, threads, || check::wanted(&plan));
                let fast = Fast::new(&plan, added.clone(), version, threads)?;
                check::check(&fast, &wanted.get()?)?;
                Ok((Box::new(fast), added, top_id))
            })
        });
        let slow = OnceLock::new();
        let (fast, added, top_id) = match made {
            Ok((fast, added, top_id)) => (Ok(fast), added, top_id),
            Err(reason) => {
                let loaded = Slow::new(json)?;
                if version != unicode::Version::default() {
                    let problem = format!(
                        "the tokenizers library has to run it, because {reason}, and has no tables of Unicode {}",
                        version.name()
                    );
                    return Err(Error::new(Kind::Tokenizer, "tokenizer.json", problem)
                        .wanted(format!("Unicode {} for this tokenizer", unicode::Version::default().name()))
                        .remedy("leave model.unicode out"));
                }
                let added = loaded.added();
                let top_id = loaded.top_id();
                let _ = slow.set(Ok(loaded));
                (Err(reason), added, top_id)
            }
        };
        let special = added
            .iter()
            .filter(|token| token.special && !token.content.is_empty())
            .map(|token| (token.content.clone(), token.id));
        let control = ControlTokens::new(special.collect())?;
        Ok(Tokenizer { json: json.to_string(), slow, fast, control, top_id, spare: Mutex::new(Vec::new()) })
    }

    /// The library's tokenizer of the same file, loaded when it is first asked for.
    fn slow(&self) -> Result<&Slow> {
        self.slow.get_or_init(|| Slow::new(&self.json)).as_ref().map_err(Clone::clone)
    }

    /// Which engine it is.
    pub fn engine(&self) -> Engine {
        Engine { fast: self.fast.is_ok(), reason: self.fast.as_ref().err().cloned().unwrap_or_default() }
    }

    /// The largest id that it can give.
    pub fn top_id(&self) -> u32 {
        self.top_id
    }

    /// The control tokens: the added tokens that are marked special.
    pub fn control(&self) -> &ControlTokens {
        &self.control
    }

    /// What a thread needs for the `_into` calls: its buffers, some 0.6 MB, beside the table that threads share.
    pub fn scratch(&self) -> Scratch {
        Scratch(self.fast.as_ref().ok().map(|fast| Box::new(fast.scratch())))
    }

    fn with_scratch<T>(&self, run: impl FnOnce(&mut Scratch) -> T) -> T {
        let spare = self.spare.try_lock().ok().and_then(|mut spare| spare.pop());
        let mut scratch = spare.unwrap_or_else(|| self.scratch());
        let result = run(&mut scratch);
        if let Ok(mut spare) = self.spare.try_lock()
            && spare.len() < SPARE
        {
            spare.push(scratch);
        }
        result
    }

    /// Ids of a text in which added tokens are recognised; nothing is put before or behind.
    pub fn encode(&self, text: &str) -> Result<Encoded> {
        self.with_scratch(|scratch| match (&self.fast, &mut scratch.0) {
            (Ok(fast), Some(scratch)) => {
                check_size(text)?;
                let mut encoded = Encoded::default();
                let mut sink = Sink { ids: &mut encoded.ids, places: Places::Spans(&mut encoded.offsets) };
                fast.encode(text, false, scratch, &mut sink, &mut |_| {});
                Ok(encoded)
            }
            _ => self.slow()?.encode(text),
        })
    }

    /// Ids of ordinary text: control tokens spelled in it stay text.
    ///
    /// # Errors
    /// Where the vocabulary itself makes a control token of its spelling.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.with_scratch(|scratch| self.encode_text_into(text, scratch, &mut ids))?;
        Ok(ids)
    }

    /// Ids of a rendered chat with marks behind the first character of each control token that a row spelled:
    /// those stay text, the others are recognised. The ranges are those of the text without marks ([`Unmarked`]).
    ///
    /// # Errors
    /// Where the vocabulary itself makes a control token of its spelling.
    pub fn encode_marked(&self, marked: &str, clean: &Unmarked, scratch: &mut Scratch) -> Result<Encoded> {
        let mut encoded = Encoded::default();
        let mut sink = Sink { ids: &mut encoded.ids, places: Places::Spans(&mut encoded.offsets) };
        if clean.marks.is_empty() {
            self.whole_into(marked, scratch, &mut sink)?;
        } else {
            self.marked_into(marked, clean, scratch, &mut sink)?;
        }
        Ok(encoded)
    }

    /// [`Tokenizer::encode`] that appends ids, and where each token ends. Token i starts where the one before ends; a
    /// character that several tokens share is cut between them, so an end may lie inside a character.
    pub fn encode_into(
        &self,
        text: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
        ends: &mut Vec<u32>,
    ) -> Result<()> {
        self.whole_into(text, scratch, &mut Sink { ids, places: Places::Ends(ends) })
    }

    /// [`Tokenizer::encode_into`] without ends.
    pub fn encode_ids_into(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<()> {
        self.whole_into(text, scratch, &mut Sink { ids, places: Places::None })
    }

    /// [`Tokenizer::encode_text`] that appends ids.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_text`]; the list then holds more than it held.
    pub fn encode_text_into(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<()> {
        let mut sink = Sink { ids, places: Places::None };
        let mut suspects = Vec::new();
        match (&self.fast, &mut scratch.0) {
            (Ok(fast), Some(scratch)) => {
                check_size(text)?;
                fast.encode(text, true, scratch, &mut sink, &mut |ids| self.suspect(ids, &mut suspects));
            }
            _ => {
                let encoded = self.slow()?.encode_text(text)?;
                self.suspect(&encoded.ids, &mut suspects);
                sink.take(encoded);
            }
        }
        self.refuse_control(&suspects, &[], text)
    }

    fn whole_into(&self, text: &str, scratch: &mut Scratch, sink: &mut Sink<'_>) -> Result<()> {
        match (&self.fast, &mut scratch.0) {
            (Ok(fast), Some(scratch)) => {
                check_size(text)?;
                fast.encode(text, false, scratch, sink, &mut |_| {});
            }
            _ => sink.take(self.slow()?.encode(text)?),
        }
        Ok(())
    }

    fn marked_into(&self, marked: &str, clean: &Unmarked, scratch: &mut Scratch, sink: &mut Sink<'_>) -> Result<()> {
        // The added tokens of the marked text are exactly those that the template wrote: a mark lies inside all others.
        let mut suspects = Vec::new();
        let place = |(start, end, id): (usize, usize, u32)| (clean.position(start), clean.position(end), id);
        let real: Vec<(usize, usize, u32)>;
        match (&self.fast, &mut scratch.0) {
            (Ok(fast), Some(scratch)) => {
                check_size(marked)?;
                real = fast.added(marked).into_iter().map(place).collect();
                fast.encode_cut(&clean.text, &real, scratch, sink, &mut |ids| self.suspect(ids, &mut suspects));
            }
            _ => {
                real = self.slow()?.find_added(marked).into_iter().map(place).collect();
                let encoded = self.slow()?.encode_cut(&clean.text, &real)?;
                self.suspect(&encoded.ids, &mut suspects);
                for (_, _, id) in &real {
                    if let Some(written) = suspects.iter().position(|suspect| suspect == id) {
                        suspects.swap_remove(written);
                    }
                }
                sink.take(encoded);
            }
        }
        self.refuse_control(&suspects, &real, &clean.text)
    }

    /// Collects the control tokens among ids.
    fn suspect(&self, ids: &[u32], suspects: &mut Vec<u32>) {
        suspects.extend(ids.iter().copied().filter(|id| self.control.is_control(*id)));
    }

    /// Fails where the text spells a control token more often than the template wrote it (`written`), and the
    /// vocabulary made that token of it. An unknown-token id for other text is none.
    fn refuse_control(&self, ids: &[u32], written: &[(usize, usize, u32)], text: &str) -> Result<()> {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            let allowed = written.iter().filter(|(_, _, other)| *other == id).count();
            let token = self.slow()?.spelling(id).unwrap_or_default();
            if !token.is_empty() && text.matches(&token).count() > allowed {
                let problem =
                    format!("{token:?} is spelled in the text, and this tokenizer has no other way to write it");
                return Err(Error::new(Kind::Tokenizer, "", problem));
            }
        }
        Ok(())
    }

    /// The text of ids, control tokens included.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.slow()?.decode(ids)
    }

    /// Each id's own text, for display. Bytes that are no UTF-8 alone become U+FFFD.
    pub fn tokens(&self, ids: &[u32]) -> Result<Vec<String>> {
        let slow = self.slow()?;
        ids.iter().map(|id| slow.token(*id)).collect()
    }
}

/// Work that is done beside other work, or, on one thread, when its result is asked for.
enum Side<'scope, T, F> {
    Begun(ScopedJoinHandle<'scope, T>),
    Later(F),
}

impl<'scope, T: Send + 'scope, F: FnOnce() -> T + Send + 'scope> Side<'scope, T, F> {
    fn new(scope: &'scope Scope<'scope, '_>, threads: usize, work: F) -> Side<'scope, T, F> {
        if threads > 1 { Side::Begun(scope.spawn(work)) } else { Side::Later(work) }
    }

    fn get(self) -> T {
        match self {
            Side::Begun(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Side::Later(work) => work(),
        }
    }
}

/// Places are counted in 32 bits.
fn check_size(text: &str) -> Result<()> {
    if text.len() < u32::MAX as usize {
        return Ok(());
    }
    let problem = format!("a text of {} bytes is too long for one document", text.len());
    Err(Error::new(Kind::Tokenizer, "", problem).wanted("less than 4 GiB"))
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
