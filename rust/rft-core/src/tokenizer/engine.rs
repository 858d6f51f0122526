//! The fast engine: added tokens, normal form, pieces, ids.

use super::Side;
use super::added::{Finder, Stretch};
use super::borders::Borders;
use super::bpe::{Bpe, Memo, Unit};
use super::cache::{COUNT, Cache, FEW, Found, Key, LONG, Listed, Long, SHORT, SOME, Shared, Short, key};
use super::cut::{Cutter, Scheme};
use super::masks::Simd;
use super::model::{Added, Form, Plan, Prefix, SPACE_MARK};
use super::normal::{Normal, normalise};
use super::rounds::Rounds;
use super::unicode::{Classes, Version};
use super::walk::{Ends, Walk};

/// A loaded fast engine. Shared by threads.
pub struct Engine {
    cutter: Cutter,
    simd: Simd,
    form: Form,
    prefix: Prefix,
    /// Whether spaces become marks before normalised added tokens are looked for, or only then.
    marks_first: bool,
    raw: Finder,
    normalized: Finder,
    bpe: Bpe,
    borders: Option<Borders>,
    /// What pieces became; from the start the vocabulary.
    shared: Shared,
}

/// What one thread works with: its view of the piece cache, and buffers. It belongs to one tokenizer.
pub struct Scratch {
    pub(super) cache: Cache,
    memo: Memo,
    ends: Option<Box<Ends>>,
    keys: Box<[Asked; 2]>,
    /// What waits to be put out: ids of known pieces, and between them gaps.
    out: Vec<u32>,
    filled: usize,
    gaps: Vec<Gap>,
    parts: Vec<Part>,
    rounds: Rounds,
    /// How many ids there were where each document ended.
    marks: Vec<u64>,
}

/// Keys of short pieces, and the slots at which they are sought first.
#[derive(Clone, Copy)]
struct Asked {
    keys: [Key; STEP],
    slots: [u32; STEP],
}

/// A piece whose ids are not at hand; an empty one is the end of a document.
struct Gap {
    /// How many ids of other pieces come before it.
    filled: usize,
    start: usize,
    end: usize,
    /// Whether it is known, but its ids are too many to stand between the others.
    known: bool,
    /// Where its parts end.
    parts: usize,
}

/// A part of such a piece.
struct Part {
    start: usize,
    end: usize,
    /// Whether it may be known: it is less than the piece.
    sought: bool,
    /// Its ids where it is known and they are few, and their number, else 0.
    few: [u32; SOME],
    count: usize,
    /// Where it is known and they are more.
    listed: Option<Listed>,
    job: Option<usize>,
}

impl Part {
    fn new(start: usize, end: usize, sought: bool) -> Part {
        Part { start, end, sought, few: [0; SOME], count: 0, listed: None, job: None }
    }
}

/// The slot of a piece that is not short: no table has it.
const NOWHERE: u32 = u32::MAX;

type Tables<'a> = (Short<'a>, Long<'a>);

/// Pieces that are looked up together.
const BATCH: usize = 512;
/// Ids and gaps that wait before they are put out. Gaps are filled together, since each waits for memory; but a new piece
/// that comes again before it is known costs twice.
const WAITING: usize = 2048;
const GAPS: usize = 48;
/// Pieces that memory is asked for while those before them are looked up.
const STEP: usize = 64;

/// Where the bytes of a worked text come from in the text given.
enum Origin<'a> {
    /// All of them, from a position on, with a space put before.
    Plain { base: usize, prefix: usize },
    /// Each has its own range; and a position to add.
    Ranges { base: usize, from: &'a [(u32, u32)] },
}

/// Where ids go, and what is told of each.
pub(super) struct Sink<'a> {
    pub ids: &'a mut Vec<u32>,
    pub places: Places<'a>,
}

/// What is told of each token's place.
pub(super) enum Places<'a> {
    /// Nothing.
    None,
    /// Where it ends; characters may be cut.
    Ends(&'a mut Vec<u32>),
    /// The whole characters that it is part of, as the `tokenizers` crate gives them.
    Spans(&'a mut Vec<(usize, usize)>),
}

/// How ids in stretches of text are looked at: those of control tokens, for [`super::Tokenizer::encode_text`].
pub(super) type Look<'a> = &'a mut dyn FnMut(&[u32]);

/// What every step is handed: buffers, where ids go, who looks at them.
struct Work<'a, 's> {
    scratch: &'a mut Scratch,
    sink: &'a mut Sink<'s>,
    look: Look<'a>,
    /// A text that the one given is in, and where, if ids may wait until the whole is done.
    whole: Option<(&'a [u8], usize)>,
}

impl Engine {
    /// From a plan and the added tokens as the library numbers them; else why it cannot be.
    pub fn new(
        plan: &Plan<'_>,
        added: Vec<Added>,
        version: Version,
        threads: usize,
    ) -> std::result::Result<Engine, String> {
        let unit = if matches!(plan.scheme, Scheme::Spaces { .. }) { Unit::Char } else { Unit::Byte };
        let (bpe, (borders, shared)) = Bpe::new(&plan.model, unit, threads, |bpe| {
            std::thread::scope(|scope| {
                let borders =
                    Side::new(scope, threads, || if bpe.has_parts() { Borders::new(bpe.texts()) } else { None });
                let shared = seeded(bpe);
                (borders.get(), shared)
            })
        })?;
        let marks_first = unit == Unit::Char && matches!(plan.prefix, Prefix::Never | Prefix::Always);
        let content = |token: &Added| -> String {
            if unit == Unit::Char && marks_first {
                let space = if plan.prefix == Prefix::Always { " " } else { "" };
                return format!("{space}{}", token.content.replace(SPACE_MARK, " "));
            }
            normalise(&token.content, plan.form).map_or_else(|| token.content.clone(), |normal| normal.text)
        };
        let (normalized, raw): (Vec<Added>, Vec<Added>) = added.into_iter().partition(|token| token.normalized);
        let finder = |tokens: Vec<(Added, String)>| Finder::new(tokens).map_err(|e| e.problem);
        let raw = finder(raw.into_iter().map(|token| (token.content.clone(), token)).map(|(c, t)| (t, c)).collect())?;
        let normalized =
            finder(normalized.into_iter().map(|token| (content(&token), token)).map(|(c, t)| (t, c)).collect())?;
        let classes = match plan.scheme {
            Scheme::Gpt2 { digits: true } => Classes::behind_digits(version),
            _ => Classes::of(version),
        };
        Ok(Engine {
            simd: Simd::best(),
            cutter: Cutter::new(plan.scheme, classes, bpe.glue()),
            form: plan.form,
            prefix: plan.prefix,
            marks_first,
            raw,
            normalized,
            borders,
            bpe,
            shared,
        })
    }

    /// What a thread needs.
    pub fn scratch(&self) -> Scratch {
        Scratch {
            cache: Cache::new(&self.shared),
            memo: Memo::default(),
            ends: None,
            keys: Box::new([Asked { keys: [0; STEP], slots: [0; STEP] }; 2]),
            out: vec![0; WAITING + 7 * BATCH],
            filled: 0,
            gaps: Vec::new(),
            parts: Vec::new(),
            rounds: Rounds::default(),
            marks: Vec::new(),
        }
    }

    /// Ids of a text with its added tokens, special ones as text where `text_only`.
    pub fn encode(&self, text: &str, text_only: bool, scratch: &mut Scratch, sink: &mut Sink<'_>, look: Look<'_>) {
        self.cut(text, text_only, &mut Work { scratch, sink, look, whole: None });
    }

    /// Ids of one of many documents that lie in one text, the one that starts at `start`. They may wait for those of the
    /// next ones, up to [`Engine::finish`].
    pub fn add(&self, text: &[u8], start: usize, document: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let mut sink = Sink { ids, places: Places::None };
        let work = &mut Work { scratch, sink: &mut sink, look: &mut |_| {}, whole: Some((text, start)) };
        self.cut(document, false, work);
        let Scratch { filled, gaps, .. } = work.scratch;
        gaps.push(Gap { filled: *filled, start, end: start, known: false, parts: 0 });
    }

    /// Puts out the ids of all documents that were added, and where each ends.
    pub fn finish(&self, text: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>, ends: &mut Vec<u64>) {
        self.put_out(text, scratch, ids);
        ends.append(&mut scratch.marks);
    }

    fn cut(&self, text: &str, text_only: bool, work: &mut Work<'_, '_>) {
        self.raw.cut(text, text_only, &mut |stretch| match stretch.id {
            Some(id) => {
                let whole = Origin::Plain { base: 0, prefix: 0 };
                self.added_token(id, stretch.start, stretch.end, text.as_bytes(), &whole, work);
            }
            None => self.stretch(text, stretch, true, text_only, work),
        });
    }

    fn added_token(
        &self,
        id: u32,
        start: usize,
        end: usize,
        text: &[u8],
        origin: &Origin<'_>,
        work: &mut Work<'_, '_>,
    ) {
        let Some((whole, _)) = work.whole else { return work.sink.added(id, start, end, text, origin) };
        work.scratch.out[work.scratch.filled] = id;
        work.scratch.filled += 1;
        self.put_out_many(whole, work.scratch, work.sink.ids);
    }

    /// Ids of a text whose added tokens are given: (start, end, id), in order.
    pub fn encode_cut(
        &self,
        text: &str,
        tokens: &[(usize, usize, u32)],
        scratch: &mut Scratch,
        sink: &mut Sink<'_>,
        look: Look<'_>,
    ) {
        let whole = Origin::Plain { base: 0, prefix: 0 };
        let mut work = Work { scratch, sink, look, whole: None };
        let mut at = 0;
        for &(start, end, id) in tokens.iter().chain([&(text.len(), text.len(), u32::MAX)]) {
            if at < start {
                self.stretch(text, Stretch { id: None, start: at, end: start }, false, false, &mut work);
            }
            if start < end {
                work.sink.added(id, start, end, text.as_bytes(), &whole);
            }
            at = end;
        }
    }

    /// The added tokens of a text: (start, end, id).
    pub fn added(&self, text: &str) -> Vec<(usize, usize, u32)> {
        let mut found = Vec::new();
        self.raw.cut(text, false, &mut |stretch| match stretch.id {
            Some(id) => found.push((stretch.start, stretch.end, id)),
            None if self.normalized.is_empty() => {}
            None => {
                let part = &text[stretch.start..stretch.end];
                self.normal(part, stretch.start, &mut |normal, origin| {
                    self.normalized.cut(normal, false, &mut |inner| {
                        if let Some(id) = inner.id {
                            let (start, end) = origin.span(normal.as_bytes(), inner.start, inner.end);
                            found.push((start, end, id));
                        }
                    });
                });
            }
        });
        found
    }

    /// A stretch in the form in which normalised added tokens are looked for.
    fn normal(&self, part: &str, base: usize, then: &mut dyn FnMut(&str, &Origin<'_>)) {
        if self.marks_first {
            return self.marked(part, base, self.prefix == Prefix::Always, then);
        }
        match normalise(part, self.form) {
            Some(Normal { text, from }) => then(&text, &Origin::Ranges { base, from: &from }),
            None => then(part, &Origin::Plain { base, prefix: 0 }),
        }
    }

    /// A stretch with spaces for marks, and one put before it where `prefix`.
    fn marked(&self, part: &str, base: usize, prefix: bool, then: &mut dyn FnMut(&str, &Origin<'_>)) {
        let count = usize::from(prefix);
        if memchr::memmem::find(part.as_bytes(), SPACE_MARK.as_bytes()).is_some() {
            let mut normal = Normal::default();
            if prefix {
                normal.text.push(' ');
                let first = part.chars().next().map_or(0, char::len_utf8) as u32;
                normal.from.push((0, first));
            }
            for (at, character) in part.char_indices() {
                let range = (at as u32, (at + character.len_utf8()) as u32);
                let character = if character == '\u{2581}' { ' ' } else { character };
                normal.text.push(character);
                normal.from.extend(std::iter::repeat_n(range, character.len_utf8()));
            }
            return then(&normal.text, &Origin::Ranges { base, from: &normal.from });
        }
        if prefix {
            let mut text = String::with_capacity(part.len() + 1);
            text.push(' ');
            text.push_str(part);
            return then(&text, &Origin::Plain { base, prefix: count });
        }
        then(part, &Origin::Plain { base, prefix: 0 });
    }

    fn stretch(&self, text: &str, stretch: Stretch, find: bool, text_only: bool, work: &mut Work<'_, '_>) {
        let part = &text[stretch.start..stretch.end];
        self.normal(part, stretch.start, &mut |normal, origin| {
            if self.normalized.is_empty() || !find {
                return self.text(normal, origin, 0, normal.len(), work);
            }
            self.normalized.cut(normal, text_only, &mut |inner| match inner.id {
                Some(id) => self.added_token(id, inner.start, inner.end, normal.as_bytes(), origin, work),
                None => self.text(normal, origin, inner.start, inner.end, work),
            });
        });
    }

    fn text(&self, normal: &str, origin: &Origin<'_>, start: usize, end: usize, work: &mut Work<'_, '_>) {
        if self.marks_first || self.prefix == Prefix::Never {
            return self.pieces(normal.as_bytes(), origin, start, end, work);
        }
        // Metaspace: the text was left as it is until here.
        let Origin::Plain { base, .. } = origin else { unreachable!("SentencePiece has no other form") };
        let (part, base) = (&normal[start..end], base + start);
        let missing = !part.starts_with([' ', '\u{2581}']);
        let prefix = missing && (self.prefix == Prefix::Missing || base == 0);
        self.marked(part, base, prefix, &mut |text, origin| {
            self.pieces(text.as_bytes(), origin, 0, text.len(), work);
        });
    }

    fn pieces(&self, text: &[u8], origin: &Origin<'_>, start: usize, end: usize, work: &mut Work<'_, '_>) {
        let Work { scratch, sink, look, whole } = work;
        let before = sink.ids.len();
        if self.bpe.lacks_bytes()
            && !matches!(sink.places, Places::None)
            && text[start..end].iter().any(|byte| !self.bpe.has_byte(*byte))
        {
            self.one_by_one(text, origin, start, end, &mut scratch.memo, sink);
            return look(&sink.ids[before..]);
        }
        if start >= end {
            return;
        }
        // Pieces of the whole text may wait, those of a changed copy may not.
        match (*whole, origin) {
            (Some((whole, at)), Origin::Plain { base, prefix: 0 }) => {
                return self.walk(whole, at + base + start, at + base + end, scratch, sink.ids);
            }
            (Some((whole, _)), _) => self.put_out(whole, scratch, sink.ids),
            _ => {}
        }
        self.walk(text, start, end, scratch, sink.ids);
        self.put_out(text, scratch, sink.ids);
        look(&sink.ids[before..]);
        sink.place(&self.bpe, text, before, start, origin);
    }

    /// Cuts a text and looks its pieces up.
    fn walk(&self, text: &[u8], start: usize, end: usize, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let (mut walk, mut first) = (Walk::new(start, end), start);
        let mut ends = scratch.ends.take().unwrap_or_default();
        while walk.next(&self.cutter, self.simd, text, &mut ends) {
            for batch in ends.get().chunks(BATCH) {
                match self.simd {
                    // SAFETY: [`Simd::all`] gives them only where the processor has these.
                    #[cfg(target_arch = "x86_64")]
                    Simd::Avx2 | Simd::Avx512 => unsafe { look_up_avx2(text, first, batch, scratch) },
                    _ => look_up_any(text, first, batch, scratch),
                }
                self.put_out_many(text, scratch, ids);
                first = batch[batch.len() - 1] as usize;
            }
        }
        scratch.ends = Some(ends);
    }

    /// Pieces of a text that lose bytes. The library counts places in the letters that stand for what is left of each
    /// piece, of which ASCII has one byte and the rest two, and reads them in those of the whole piece.
    fn one_by_one(
        &self,
        text: &[u8],
        origin: &Origin<'_>,
        start: usize,
        end: usize,
        memo: &mut Memo,
        sink: &mut Sink<'_>,
    ) {
        let letters = |byte: u8| if byte.is_ascii_graphic() { 1 } else { 2 };
        let (mut at, mut places) = (start, Vec::new());
        while at < end {
            let stop = self.cutter.piece(text, at, end);
            let before = sink.ids.len();
            self.bpe.encode(&text[at..stop], memo, sink.ids);
            places.clear();
            for (index, byte) in (at..stop).zip(&text[at..stop]) {
                places.extend(std::iter::repeat_n(index, letters(*byte)));
            }
            let mut kept = text[at..stop].iter().filter(|byte| self.bpe.has_byte(**byte));
            let mut done = 0;
            for id in &sink.ids[before..] {
                let width = usize::from(self.bpe.widths()[*id as usize]);
                let from = done;
                done += kept.by_ref().take(width).map(|byte| letters(*byte)).sum::<usize>();
                match &mut sink.places {
                    Places::None => {}
                    Places::Ends(ends) => ends.push(origin.end(places[done - 1] + 1)),
                    Places::Spans(spans) => spans.push(origin.span(text, places[from], places[done - 1] + 1)),
                }
            }
            at = stop;
        }
    }

    /// Puts out what waits where it is much. Afterwards there is room for a batch.
    #[inline(always)]
    fn put_out_many(&self, text: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        if scratch.filled >= WAITING || scratch.gaps.len() >= GAPS {
            self.put_out(text, scratch, ids);
        }
    }

    /// Appends what waits, of pieces of this text.
    fn put_out(&self, text: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        if scratch.gaps.is_empty() {
            ids.extend_from_slice(&scratch.out[..scratch.filled]);
        } else {
            self.fill(text, scratch, ids);
            scratch.gaps.clear();
        }
        scratch.filled = 0;
    }

    /// Appends what was found, and in its gaps the ids of pieces that were not.
    #[inline(never)]
    fn fill(&self, text: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let Scratch { cache, memo, out, filled, gaps, parts, rounds, marks, .. } = scratch;
        parts.clear();
        rounds.clear();
        for gap in gaps.iter_mut() {
            let (piece, base) = (&text[gap.start..gap.end], gap.start);
            let mut start = base;
            let listed = if gap.known || piece.len() > LONG { cache.own(piece) } else { None };
            match &self.borders {
                _ if piece.is_empty() => {}
                Some(borders) if listed.is_none() && !piece.is_ascii() => borders.cut(piece, |end| {
                    let end = base + end;
                    if end - start <= SHORT {
                        cache.short().ask(key(text, start, end - start));
                    }
                    parts.push(Part::new(start, end, end - start < piece.len()));
                    start = end;
                }),
                _ => parts.push(Part { listed, ..Part::new(start, gap.end, false) }),
            }
            gap.parts = parts.len();
        }
        for part in parts.iter_mut().filter(|part| part.listed.is_none()) {
            let found = if part.sought { cache.find(text, part.start, part.end) } else { None };
            match found {
                Some(Found::Few(few, count)) => (part.few, part.count) = (few, count),
                Some(Found::Many(listed)) => part.listed = Some(listed),
                None => {
                    let piece = &text[part.start..part.end];
                    part.job = self.bpe.whole(piece).is_none().then(|| rounds.add(&self.bpe, piece)).flatten();
                }
            }
        }
        rounds.run(&self.bpe, self.simd);
        let (mut copied, mut next) = (0, 0);
        for gap in gaps.iter() {
            ids.extend_from_slice(&out[copied..gap.filled]);
            copied = gap.filled;
            let before = ids.len();
            if gap.start == gap.end {
                marks.push(before as u64);
            }
            for part in &parts[next..gap.parts] {
                if part.count > 0 {
                    ids.extend_from_slice(&part.few[..part.count]);
                    continue;
                }
                if let Some(listed) = part.listed {
                    ids.extend_from_slice(cache.listed(listed));
                    continue;
                }
                // New ones may stand here twice.
                let before = ids.len();
                match cache.find(text, part.start, part.end) {
                    Some(Found::Few(few, count)) => ids.extend_from_slice(&few[..count]),
                    Some(Found::Many(listed)) => ids.extend_from_slice(cache.listed(listed)),
                    None => {
                        match part.job {
                            Some(job) => rounds.ids(job, &self.bpe, ids),
                            None => self.bpe.encode(&text[part.start..part.end], memo, ids),
                        }
                        cache.keep(&self.shared, text, part.start, part.end, &ids[before..]);
                    }
                }
            }
            if gap.parts - next > 1 && cache.find(text, gap.start, gap.end).is_none() {
                cache.keep(&self.shared, text, gap.start, gap.end, &ids[before..]);
            }
            next = gap.parts;
        }
        ids.extend_from_slice(&out[copied..*filled]);
    }
}

/// Tokens between one whose slot is asked for and the one that is put.
const AHEAD: usize = 24;

/// What is known from the start: every token that merges reach. (Others in the vocabulary are not what their text becomes.)
fn seeded(bpe: &Bpe) -> Shared {
    let short = bpe.texts().filter(|text| text.len() <= SHORT).count();
    let shared = Shared::new(short + short / 4);
    let mut cache = Cache::new(&shared);
    // Each lies somewhere else: memory is asked for ahead.
    let mut ahead = bpe.texts().skip(AHEAD);
    for (text, id) in bpe.texts().zip(bpe.ids()) {
        if let Some(next) = ahead.next().filter(|next| next.len() <= SHORT) {
            cache.short().ask(key(next, 0, next.len()));
        }
        if text.len() <= LONG {
            cache.keep(&shared, text, 0, text.len(), &[*id]);
        }
    }
    shared
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt")]
fn look_up_avx2(text: &[u8], first: usize, ends: &[u32], scratch: &mut Scratch) {
    look_up_any(text, first, ends, scratch);
}

/// Brings what is known of the pieces from `first` on that end at `ends`, at most [`BATCH`], to what waits to be put out;
/// what is not leaves a gap.
#[inline(always)]
fn look_up_any(text: &[u8], first: usize, ends: &[u32], scratch: &mut Scratch) {
    let Scratch { cache, keys, out, gaps, .. } = scratch;
    let tables = (cache.short(), cache.long());
    let (mut asked, mut start, mut filled) = (first, first, scratch.filled);
    let (mut steps, mut half) = (ends.chunks(STEP).peekable(), 0);
    if let Some(step) = steps.peek() {
        asked = ask(tables, text, asked, step, &mut keys[0]);
    }
    while let Some(step) = steps.next() {
        if let Some(step) = steps.peek() {
            asked = ask(tables, text, asked, step, &mut keys[half ^ 1]);
        }
        let asked = &keys[half];
        half ^= 1;
        for (at, (key, slot)) in asked.keys.iter().zip(&asked.slots).take(step.len()).enumerate() {
            // Nearly all stand where they are sought first; the others are left to a call, for which this loop has few
            // values to hold.
            if let Some((ids, count)) = tables.0.first(*key, *slot)
                && let Some(room) = out[filled..].first_chunk_mut::<FEW>()
            {
                *room = *ids;
                room[0] = ids[0] & ((1 << COUNT) - 1);
                filled += count;
                continue;
            }
            let from = if at == 0 { start } else { step[at - 1] as usize };
            filled = look_further(tables, text, (from, step[at] as usize), *key, *slot, (out, filled), gaps);
        }
        start = step[step.len() - 1] as usize;
    }
    scratch.filled = filled;
}

/// Looks up a piece, which is not where it was sought first; gives how many ids wait then.
#[inline(never)]
fn look_further(
    (short, long): Tables<'_>,
    text: &[u8],
    (start, end): (usize, usize),
    key: Key,
    slot: u32,
    (out, filled): (&mut [u32], usize),
    gaps: &mut Vec<Gap>,
) -> usize {
    let length = end - start;
    let (found, most) = if length <= SHORT {
        (short.get(key, slot).map(|([a, b, c, d], count)| ([a, b, c, d, 0, 0, 0], count)), FEW)
    } else if length <= LONG {
        (long.get(text, start, length), SOME)
    } else {
        (None, 0)
    };
    match found {
        Some((few, count)) if count <= most => {
            out[filled..filled + SOME].copy_from_slice(&few);
            return filled + count;
        }
        _ => gaps.push(Gap { filled, start, end, known: found.is_some(), parts: 0 }),
    }
    filled
}

/// Makes the keys of the pieces from `from` on and asks for their cache lines; gives where the last one ends.
#[inline(always)]
fn ask((short, long): Tables<'_>, text: &[u8], mut from: usize, ends: &[u32], asked: &mut Asked) -> usize {
    for ((at_key, at_slot), end) in asked.keys.iter_mut().zip(&mut asked.slots).zip(ends) {
        let end = *end as usize;
        if end - from <= SHORT {
            let key = key(text, from, end - from);
            (*at_key, *at_slot) = (key, short.ask(key));
        } else {
            *at_slot = NOWHERE;
            if end - from <= LONG {
                long.ask(text, from, end - from);
            }
        }
        from = end;
    }
    from
}

impl Origin<'_> {
    /// The range of the text given for a range of the worked text, in whole characters.
    fn span(&self, text: &[u8], start: usize, end: usize) -> (usize, usize) {
        match self {
            Origin::Ranges { base, from } => (base + from[start].0 as usize, base + from[end - 1].1 as usize),
            Origin::Plain { base, prefix } => {
                let (mut start, mut end) = (start.max(*prefix), end.max(prefix + 1));
                while text.get(start).is_some_and(|byte| byte & 0xc0 == 0x80) {
                    start -= 1;
                }
                while text.get(end).is_some_and(|byte| byte & 0xc0 == 0x80) {
                    end += 1;
                }
                (base + start - prefix, base + end - prefix)
            }
        }
    }

    /// Where a token that ends at `end` of the worked text ends in the text given.
    fn end(&self, end: usize) -> u32 {
        match self {
            Origin::Ranges { base, from } => *base as u32 + from[end - 1].1,
            Origin::Plain { base, prefix } => (base + end.max(*prefix) - prefix) as u32,
        }
    }
}

impl Sink<'_> {
    fn added(&mut self, id: u32, start: usize, end: usize, text: &[u8], origin: &Origin<'_>) {
        self.ids.push(id);
        match &mut self.places {
            Places::None => {}
            Places::Ends(ends) => ends.push(origin.end(end)),
            Places::Spans(spans) => spans.push(origin.span(text, start, end)),
        }
    }

    /// Tells the places of the ids from `before` on, which cover the worked text from `start` on.
    fn place(&mut self, bpe: &Bpe, text: &[u8], before: usize, start: usize, origin: &Origin<'_>) {
        let (widths, mut at) = (bpe.widths(), start);
        match &mut self.places {
            Places::None => {}
            Places::Ends(ends) => {
                if let Origin::Plain { base, prefix: 0 } = origin {
                    ends.extend(self.ids[before..].iter().map(|id| {
                        at += usize::from(widths[*id as usize]);
                        (base + at) as u32
                    }));
                    return;
                }
                for id in &self.ids[before..] {
                    at += usize::from(widths[*id as usize]);
                    ends.push(origin.end(at));
                }
            }
            Places::Spans(spans) => {
                for id in &self.ids[before..] {
                    let from = at;
                    at += usize::from(widths[*id as usize]);
                    spans.push(origin.span(text, from, at));
                }
            }
        }
    }
}

impl Sink<'_> {
    /// Takes what the library gave.
    pub(super) fn take(&mut self, encoded: super::Encoded) {
        self.ids.extend_from_slice(&encoded.ids);
        match &mut self.places {
            Places::None => {}
            Places::Spans(spans) => spans.extend(encoded.offsets),
            Places::Ends(ends) => {
                // Tokens that share a character have the same range: their ends may not go back.
                let mut last = 0;
                ends.extend(encoded.offsets.iter().map(|(_, end)| {
                    last = last.max(*end as u32);
                    last
                }));
            }
        }
    }
}
