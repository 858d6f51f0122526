//! Files -> a prepared set: read, render, tokenise and mask block by block, in the order of the files.
//!
//! Blocks are worked on by threads that live only as long as the call; what is written does not depend on their number,
//! nor on whether an earlier run was killed on the way.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value as Json};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::counts::{Counts, Note};
use crate::detect;
use crate::error::{Error, Kind, Result};
use crate::example::Parser;
use crate::format::Format;
use crate::jsonl::{Block, Layout};
use crate::key;
use crate::pipeline;
use crate::readers::{self, Reader};
use crate::row_error::{Reason, RowError};
use crate::rows::{Outcome, Renderer, Rows, Scratch};
use crate::seen::Seen;
use crate::spec::{FormatChoice, OnError, Part, Source, Spec};
use crate::store::{self, Begun, Document, Shard, SourceRecord, Writer};
use crate::tokens::{Tokens, Told};

/// A block is what a thread takes at a time: large enough for a caller's renderer, small enough to share out evenly.
const BLOCK_ROWS: usize = 1024;
const BLOCK_BYTES: usize = 1 << 20;
/// Rows that decide a format.
const SAMPLE_ROWS: usize = 100;

/// What the caller hears and may say while a set is made.
pub trait Observer {
    /// After every block, and now and then while there is nothing new. An error stops the preparation.
    fn progress(&mut self, bytes_read: u64, bytes_total: u64, rows: u64) -> Result<()>;
}

/// A set that is there.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// What was read, kept and dropped, as in the manifest.
    pub counts: Json,
    /// Whether this call wrote it, or found it.
    pub written: bool,
    /// Rows that an earlier run, which was stopped, had done already.
    pub resumed_rows: u64,
}

/// Makes the set at `out`, unless it is there.
///
/// # Errors
/// The first bad row under `on_error = fail`; no trained token at all; whatever reading or writing meets. What is
/// complete stays beside `out` for the next call where that could help: after an interruption, or with a full disk.
pub fn prepare(
    spec: &Spec,
    out: &Path,
    renderer: Option<&dyn Renderer>,
    observer: &mut dyn Observer,
) -> Result<Prepared> {
    let threads = spec.num_threads();
    std::thread::scope(|scope| {
        // The files are hashed before the first row is read, which takes one thread: a second one loads the tokenizer.
        let is_new = !out.join(store::MANIFEST).exists();
        let early = (threads > 1 && renderer.is_none() && is_new).then(|| scope.spawn(|| Rows::new(spec, None)));
        let total = spec.sources.iter().map(readers::size).sum();
        let hashes = key::hashes(spec)?;
        let inputs = key::inputs(spec, &hashes);
        let layout = layout(spec, key::of_inputs(&inputs));
        let begun = Writer::begin(out, layout, &mut || observer.progress(0, total, 0))?;
        let (mut writer, state) = match begun {
            Begun::Complete(set) => {
                let counts = set.manifest().counts.clone();
                return Ok(Prepared { counts, written: false, resumed_rows: 0 });
            }
            Begun::Write(writer, state) => (writer, state),
        };
        let rows = match early {
            Some(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
            None => Rows::new(spec, renderer),
        };
        let counts = state.map_or(Ok(Counts::default()), Counts::from_state)?;
        let resumed_rows = counts.read();
        let seen = if spec.dedup { Some(seen_before(&writer)?) } else { None };
        let mut assembly = Assembly { spec, sink: &mut *writer, counts, seen };
        match rows.and_then(|rows| assembly.run(&rows, observer, Some(&hashes), threads, total)) {
            Ok((report, sources)) => {
                writer.finish(sources, report.clone(), inputs)?;
                Ok(Prepared { counts: report, written: true, resumed_rows })
            }
            Err(error) if matches!(error.kind, Kind::Data | Kind::Template | Kind::Tokenizer) => {
                // The same would happen again, and mending it changes the key.
                writer.discard();
                Err(error)
            }
            Err(mut error) => {
                let complete = writer.complete_shards();
                if error.kind == Kind::Full && complete > 0 {
                    error.problem +=
                        &format!("; {complete} complete shards are kept, and the next run goes on behind them");
                }
                Err(error)
            }
        }
    })
}

fn panicked() -> Error {
    Error::new(Kind::Io, "prepare", "a thread that loads the tokenizer panicked (its message is above)")
}

/// What all shards of a request's set have in common.
pub(crate) fn layout(spec: &Spec, key: String) -> store::Layout {
    store::Layout {
        key,
        vocab_size: spec.tokenizer.vocab_size,
        tokenizer: xxh3_64(spec.tokenizer.json.as_bytes()),
        template: spec.template.as_ref().map_or(0, |text| xxh3_64(text.as_bytes())),
        unicode: spec.tokenizer.unicode.name().into(),
        shard_bytes: spec.shard_bytes,
    }
}

/// Where documents go, shard by shard.
pub(crate) trait Sink {
    fn push(&mut self, document: &Document) -> Result<()>;
    /// Whether it is time for `cut`.
    fn is_full(&self) -> bool;
    /// Closes the shard. `state`: what it takes to go on behind it.
    fn cut(&mut self, state: Json) -> Result<()>;
    /// Documents, tokens and trained tokens so far.
    fn totals(&self) -> [u64; 3];
    /// Said before a cut: about how many bytes of the sources were read for what was pushed.
    fn reading(&mut self, _bytes: u64) {}
}

impl Sink for Writer {
    fn push(&mut self, document: &Document) -> Result<()> {
        Writer::push(self, document)
    }
    fn is_full(&self) -> bool {
        Writer::is_full(self)
    }
    fn cut(&mut self, state: Json) -> Result<()> {
        Writer::cut(self, state)
    }
    fn totals(&self) -> [u64; 3] {
        [self.num_documents(), self.num_tokens(), self.trained_tokens()]
    }
}

/// Documents that are being put together.
pub(crate) struct Assembly<'a> {
    pub spec: &'a Spec,
    pub sink: &'a mut dyn Sink,
    pub counts: Counts,
    /// Under `dedup`: what was kept.
    pub seen: Option<Seen>,
}

/// A block on its way to a thread.
struct Task {
    source: usize,
    parser: Arc<Parser>,
    layout: Layout,
    block: Block,
    /// Rows at its start that are done already.
    skip: usize,
    /// Number of its first row in the data set.
    first_row: u64,
    /// Bytes of all files read before it and with it.
    bytes: (u64, u64),
    lane: usize,
    /// Said with the first block of a file: why it is read as it is.
    evidence: Option<String>,
}

impl Task {
    /// Whether there is anything in it that is not done.
    fn is_new(&self) -> bool {
        self.skip < self.block.len() || self.evidence.is_some()
    }
}

/// A block that was worked on, in a few large buffers: many small ones, taken in one thread and given back in another, leave
/// the allocator with memory that it cannot use again.
#[derive(Default)]
struct Made {
    rows: Vec<RowMade>,
    documents: Vec<Kept>,
    ids: Vec<u32>,
    runs: Vec<[u32; 2]>,
    weights: Vec<f32>,
}

/// Memory of blocks that are done, for those to come. Given back to the system, it would be asked for again page by page:
/// zeroing these was 3.5 % of the CPU time of two threads.
#[derive(Default)]
struct Spare(Mutex<(Vec<Block>, Vec<Made>)>);

/// Memory of more than a few ordinary blocks is not kept: it came from rows that are far larger than others.
const MOST_SPARE: usize = 16 * BLOCK_BYTES;

impl Spare {
    fn block(&self) -> Block {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.pop().unwrap_or_default()
    }

    fn made(&self) -> Made {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.pop().unwrap_or_default()
    }

    fn put(&self, mut block: Block, mut made: Made) {
        block.clear();
        made.clear();
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if block.capacity() <= MOST_SPARE {
            spare.0.push(block);
        }
        if made.capacity() <= MOST_SPARE {
            spare.1.push(made);
        }
    }
}

/// What became of a row.
enum RowMade {
    /// The next so many documents, each written so many times.
    Kept {
        documents: usize,
        copies: u32,
    },
    Dropped(RowError),
}

/// A document in the block's buffers.
struct Kept {
    ids: Range<usize>,
    runs: Range<usize>,
    weights: Option<Range<usize>>,
    /// Under `dedup`.
    hash: Option<u128>,
    told: Told,
}

impl Made {
    fn clear(&mut self) {
        self.rows.clear();
        self.documents.clear();
        self.ids.clear();
        self.runs.clear();
        self.weights.clear();
    }

    /// Bytes of the large buffers.
    fn capacity(&self) -> usize {
        4 * (self.ids.capacity() + 2 * self.runs.capacity() + self.weights.capacity())
    }

    fn push(&mut self, tokens: &Tokens, dedup: bool) {
        let (ids, runs, weights) = (self.ids.len(), self.runs.len(), self.weights.len());
        self.ids.extend_from_slice(&tokens.ids);
        push_runs(&tokens.trained, &mut self.runs);
        let own = tokens.weights.as_ref().map(|own| {
            self.weights.extend_from_slice(own);
            weights..self.weights.len()
        });
        let hash = dedup.then(|| {
            let weights: Option<Vec<u8>> =
                tokens.weights.as_ref().map(|all| all.iter().flat_map(|weight| weight.to_le_bytes()).collect());
            hash_of(&tokens.ids, &self.runs[runs..], weights.as_deref())
        });
        let (ids, runs) = (ids..self.ids.len(), runs..self.runs.len());
        self.documents.push(Kept { ids, runs, weights: own, hash, told: tokens.told() });
    }
}

impl Assembly<'_> {
    /// Reads all that `counts` does not say is done. `hashes`: of the sources, where they are known and have to be met.
    pub(crate) fn run(
        &mut self,
        rows: &Rows,
        observer: &mut dyn Observer,
        hashes: Option<&[String]>,
        threads: usize,
        total: u64,
    ) -> Result<(Json, Vec<SourceRecord>)> {
        let spec = self.spec;
        let spare = Spare::default();
        let observer = std::cell::RefCell::new((observer, 0, self.counts.read()));
        let poll = || {
            let mut told = observer.borrow_mut();
            let (bytes_read, rows) = (told.1, told.2);
            told.0.progress(bytes_read, total, rows)
        };
        let mut input = Input::new(spec, rows, hashes, &self.counts, &poll, &spare);
        let tell = |bytes_read: u64, rows: u64| {
            let mut told = observer.borrow_mut();
            (told.1, told.2) = (bytes_read, rows);
            told.0.progress(bytes_read, total, rows)
        };
        pipeline::in_order(
            threads,
            || input.next(),
            Scratch::default,
            |task, scratch| work(spec, rows, &task, scratch, spare.made()).map(|made| (task, made)),
            |(task, made)| {
                self.record(&task, &made)?;
                let done = task.bytes.1;
                spare.put(task.block, made);
                tell(done, self.counts.read())
            },
            poll,
        )?;
        tell(total, self.counts.read())?;
        if self.sink.totals()[2] == 0 {
            return Err(self.counts.nothing_trained(spec));
        }
        let mut report = self.counts.to_json(self.sink.totals(), rows.tokenizer().control().is_empty());
        let engine = rows.tokenizer().engine();
        if !engine.fast {
            report["slow_tokenizer"] = engine.reason.into();
        }
        Ok((report, input.records.into_values().collect()))
    }

    /// Writes a block's kept rows, counts the dropped ones, or stops.
    fn record(&mut self, task: &Task, made: &Made) -> Result<()> {
        let source = &self.spec.sources[task.source];
        if let Some(evidence) = &task.evidence {
            self.counts.begin_source(task.source, source, task.parser.format(), evidence);
        }
        self.counts.select_source(task.source);
        let Made { rows, documents, ids, runs, weights } = made;
        let mut documents = documents.as_slice();
        for (number, row) in rows.iter().enumerate() {
            let line = task.block.row(task.skip + number).0;
            match row {
                RowMade::Kept { documents: count, copies } => {
                    let (own, rest) = documents.split_at(*count);
                    documents = rest;
                    let mut new: Vec<&Kept> = own.iter().collect();
                    if let Some(seen) = &mut self.seen {
                        new.retain(|part| part.hash.is_none_or(|hash| seen.insert(hash)));
                    }
                    self.counts.drop_documents(own.len() - new.len());
                    if new.is_empty() {
                        self.counts.drop_row(&RowError::new(Reason::Duplicate, "", ""), Note::default());
                        continue;
                    }
                    self.counts.keep(new.iter().map(|part| &part.told), *copies);
                    for _ in 0..*copies {
                        for part in &new {
                            let document = Document {
                                ids: &ids[part.ids.clone()],
                                trained: &runs[part.runs.clone()],
                                weights: part.weights.clone().map(|own| &weights[own]),
                                source: task.source as u32,
                                line,
                            };
                            self.sink.push(&document).map_err(|e| at_row(e, source, line))?;
                        }
                    }
                    if self.sink.is_full() {
                        let part = (task.bytes.1 - task.bytes.0) * (task.skip + number + 1) as u64;
                        self.sink.reading(task.bytes.0 + part / task.block.len().max(1) as u64);
                        self.sink.cut(self.counts.to_state()?)?;
                    }
                }
                RowMade::Dropped(error) if error.reason.is_error() && self.spec.on_error == OnError::Fail => {
                    return Err(row_error(source, line, error));
                }
                RowMade::Dropped(error) => {
                    let note = Note { place: format!("{}:{line}", source.shown()), text: error.problem.clone() };
                    self.counts.drop_row(error, note);
                }
            }
        }
        Ok(())
    }
}

/// The documents in the shards that an earlier run left.
fn seen_before(writer: &Writer) -> Result<Seen> {
    let mut seen = Seen::default();
    for shard in writer.shards() {
        let shard: Shard = shard?;
        for document in 0..shard.num_documents() {
            let range = shard.range(document);
            let runs: Vec<[u32; 2]> =
                shard.trained_runs(range.clone()).map(|run| [run.start as u32, run.end as u32]).collect();
            let weights = shard.weights(range.clone()).map(|weights| weights.as_flattened().to_vec());
            seen.insert(hash_of(&shard.ids(range).to_vec(), &runs, weights.as_deref()));
        }
    }
    Ok(seen)
}

fn at_row(mut error: Error, source: &Source, line: u64) -> Error {
    if error.place.is_empty() || error.kind == Kind::Tokenizer {
        error.place = format!("{}:{line}", source.shown());
    }
    error
}

/// Turns a block's rows into documents, in the memory of an empty `made`.
fn work(spec: &Spec, rows: &Rows, task: &Task, scratch: &mut Scratch, mut made: Made) -> Result<Made> {
    let source = &spec.sources[task.source];
    let held_out = spec.holdout.is_some_and(|holdout| holdout.part == Part::Eval);
    let copies_of = |number: u64| {
        if source.max_rows.is_some_and(|most| number >= most) {
            return Err(Reason::OverMaxRows);
        }
        match source.copies(spec.seed, number) {
            0 => Err(Reason::NotSampled),
            // A weight says how often a row is trained on; held out, it counts once.
            copies => Ok(if held_out { 1 } else { copies }),
        }
    };
    let choices: Vec<std::result::Result<u32, Reason>> =
        (task.skip..task.block.len()).map(|row| copies_of(task.first_row + row as u64)).collect();
    let chosen: Vec<&[u8]> = (task.skip..task.block.len())
        .zip(&choices)
        .filter(|(_, choice)| choice.is_ok())
        .map(|(row, _)| task.block.row(row).1)
        .collect();
    let mut outcomes = rows.block(&task.parser, task.layout, &chosen, scratch)?.into_iter();
    let missing = || Error::new(Kind::Argument, "prepare", "fewer rows came back than were given");
    for choice in choices {
        let copies = match choice {
            Ok(copies) => copies,
            Err(reason) => {
                made.rows.push(RowMade::Dropped(RowError::new(reason, "", "")));
                continue;
            }
        };
        let row = match outcomes.next().ok_or_else(missing)? {
            Outcome::Dropped(error) => RowMade::Dropped(error),
            Outcome::Kept(documents) => {
                documents.iter().for_each(|tokens| made.push(tokens, spec.dedup));
                RowMade::Kept { documents: documents.len(), copies }
            }
        };
        made.rows.push(row);
    }
    Ok(made)
}

/// Adds the maximal runs of set bits.
fn push_runs(trained: &[bool], runs: &mut Vec<[u32; 2]>) {
    let mut at = 0;
    while let Some(start) = trained[at..].iter().position(|bit| *bit).map(|offset| at + offset) {
        let end = trained[start..].iter().position(|bit| !*bit).map_or(trained.len(), |offset| start + offset);
        runs.push([start as u32, end as u32]);
        at = end;
    }
}

/// The hash of a document's ids, labels and weights (1 each where there are none).
fn hash_of(ids: &[u32], runs: &[[u32; 2]], weights: Option<&[u8]>) -> u128 {
    const ONE: [u8; 4] = 1f32.to_le_bytes();
    let mut hash = Xxh3::new();
    hash.update(&(ids.len() as u64).to_le_bytes());
    let mut buffer = Vec::with_capacity(ids.len() * 4);
    buffer.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    buffer.extend(runs.iter().flatten().flat_map(|bound| bound.to_le_bytes()));
    hash.update(&buffer);
    if let Some(weights) = weights
        && weights.chunks(4).any(|weight| weight != ONE)
    {
        hash.update(weights);
    }
    hash.digest128()
}

/// The files, block by block: all in one lane, or a lane a data set, which advance in step.
struct Input<'a> {
    spec: &'a Spec,
    rows: &'a Rows<'a>,
    hashes: Option<&'a [String]>,
    poll: &'a dyn Fn() -> Result<()>,
    lanes: Vec<Lane>,
    /// Rows that are done of the sources that were begun.
    done: BTreeMap<usize, u64>,
    /// The first lanes are still to be brought to where an earlier run was.
    behind: usize,
    /// Rows read of each data set.
    set_rows: BTreeMap<u32, u64>,
    /// By number of the source.
    records: BTreeMap<usize, SourceRecord>,
    spare: &'a Spare,
}

/// Files that are read one after another.
struct Lane {
    sources: std::vec::IntoIter<usize>,
    open: Option<Open>,
    /// Bytes of the files before the open one, and of all.
    bytes: (u64, u64),
    ended: bool,
}

impl Lane {
    fn bytes_read(&self) -> u64 {
        self.bytes.0 + self.open.as_ref().map_or(0, |open| open.reader.bytes_read())
    }
}

struct Open {
    source: usize,
    reader: Reader,
    parser: Arc<Parser>,
    first: Option<Block>,
    evidence: Option<String>,
    skip: u64,
    /// Keeps a fetched file in the cache.
    _in_use: Option<std::fs::File>,
}

impl<'a> Input<'a> {
    fn new(
        spec: &'a Spec,
        rows: &'a Rows<'a>,
        hashes: Option<&'a [String]>,
        counts: &Counts,
        poll: &'a dyn Fn() -> Result<()>,
        spare: &'a Spare,
    ) -> Input<'a> {
        let mut sets: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (index, source) in spec.sources.iter().enumerate() {
            sets.entry(if spec.interleave { source.set } else { 0 }).or_default().push(index);
        }
        let lane = |sources: Vec<usize>| {
            let all = sources.iter().map(|index| readers::size(&spec.sources[*index])).sum();
            Lane { sources: sources.into_iter(), open: None, bytes: (0, all), ended: false }
        };
        let done = counts.rows_of_sources();
        let lanes: Vec<Lane> = sets.into_values().map(lane).collect();
        let behind = if done.is_empty() { 0 } else { lanes.len() };
        let (set_rows, records) = (BTreeMap::new(), BTreeMap::new());
        Input { spec, rows, hashes, poll, lanes, done, behind, set_rows, records, spare }
    }

    fn next(&mut self) -> Result<Option<Task>> {
        // What an earlier run left half done comes first, then whichever lane lags: so blocks come as they would have.
        let mut half_done = None;
        while self.behind > 0 {
            self.behind -= 1;
            half_done = self.catch_up(self.behind)?.or(half_done);
        }
        if let Some(mut task) = half_done {
            let (own, others) = (task.bytes.1 - task.bytes.0, self.bytes_of_others(task.lane));
            task.bytes.1 = others + self.lanes[task.lane].bytes_read();
            task.bytes.0 = task.bytes.1 - own;
            return Ok(Some(task));
        }
        loop {
            let share = |lane: &Lane| lane.bytes_read() as f64 / lane.bytes.1.max(1) as f64;
            let lanes = self.lanes.iter().enumerate().filter(|(_, lane)| !lane.ended);
            let Some((lane, _)) = lanes.min_by(|(_, a), (_, b)| share(a).total_cmp(&share(b))) else {
                return Ok(None);
            };
            if let Some(task) = self.next_of(lane)?.filter(Task::is_new) {
                return Ok(Some(task));
            }
        }
    }

    /// Reads what is done of a lane again; the block that is done in part.
    fn catch_up(&mut self, lane: usize) -> Result<Option<Task>> {
        let last =
            self.lanes[lane].sources.as_slice().iter().rev().find(|index| self.done.contains_key(index)).copied();
        while let Some(index) = last.and_then(|_| self.lanes[lane].sources.next()) {
            self.begin(lane, index)?;
            if Some(index) == last {
                break;
            }
        }
        while self.lanes[lane].open.as_ref().is_some_and(|open| Some(open.source) == last && open.skip > 0) {
            if let Some(task) = self.next_of(lane)?.filter(Task::is_new) {
                return Ok(Some(task));
            }
        }
        Ok(None)
    }

    /// The next block of a lane, done or not; none where it ends.
    fn next_of(&mut self, lane: usize) -> Result<Option<Task>> {
        let mut before = self.lanes[lane].bytes_read();
        let (mut open, block, evidence) = loop {
            let Some(mut open) = self.lanes[lane].open.take() else {
                match self.lanes[lane].sources.next() {
                    None => {
                        self.lanes[lane].ended = true;
                        return Ok(None);
                    }
                    Some(index) => self.begin(lane, index)?,
                }
                continue;
            };
            let block = match open.first.take() {
                Some(block) => Some(block),
                None => {
                    let mut block = self.spare.block();
                    open.reader.next_into(&mut block, BLOCK_ROWS, BLOCK_BYTES)?.then_some(block)
                }
            };
            let evidence = open.evidence.take();
            if block.is_some() || evidence.is_some() {
                break (open, block, evidence);
            }
            let (hash, bytes) = open.reader.finish()?;
            self.end(lane, open.source, &key::hex(hash), bytes)?;
            before = self.lanes[lane].bytes_read();
        };
        let block = block.unwrap_or_default();
        let set_rows = self.set_rows.entry(self.spec.sources[open.source].set).or_default();
        let first_row = *set_rows;
        *set_rows += block.len() as u64;
        let skip = (block.len() as u64).min(open.skip) as usize;
        open.skip -= skip as u64;
        let (source, parser, layout) = (open.source, open.parser.clone(), open.reader.layout());
        self.lanes[lane].open = Some(open);
        let (own, others) = (self.lanes[lane].bytes_read(), self.bytes_of_others(lane));
        let bytes = (others + before.min(own), others + own);
        Ok(Some(Task { source, parser, layout, skip, first_row, bytes, lane, evidence, block }))
    }

    fn bytes_of_others(&self, lane: usize) -> u64 {
        self.lanes.iter().enumerate().filter(|(number, _)| *number != lane).map(|(_, other)| other.bytes_read()).sum()
    }

    /// Opens a file, unless an earlier run did all of it: then it is only read for its hash.
    fn begin(&mut self, lane: usize, index: usize) -> Result<()> {
        let spec = self.spec;
        let source = &spec.sources[index];
        let behind_it = self.lanes[lane].sources.as_slice();
        if behind_it.iter().any(|later| self.done.contains_key(later)) {
            *self.set_rows.entry(source.set).or_default() += self.done.get(&index).copied().unwrap_or_default();
            if self.hashes.is_none() {
                return self.end(lane, index, "", 0);
            }
            let (hash, bytes) = readers::hash(source)?;
            return self.end(lane, index, &key::hex(hash), bytes);
        }
        let (source, in_use) = readers::local(source, self.poll)?;
        let source = &source;
        let mut reader = Reader::open(source)?;
        let first = reader.next_block(BLOCK_ROWS, BLOCK_BYTES)?;
        let (parser, evidence) = choose_parser(source, &reader, first.as_ref(), spec.on_error)?;
        if first.is_some() {
            self.rows.check_template(&parser, source, &evidence)?;
        }
        let resumed = self.done.get(&index).copied();
        self.lanes[lane].open = Some(Open {
            source: index,
            reader,
            parser: Arc::new(parser),
            first,
            evidence: resumed.is_none().then_some(evidence),
            skip: resumed.unwrap_or_default(),
            _in_use: in_use,
        });
        Ok(())
    }

    fn end(&mut self, lane: usize, index: usize, found: &str, bytes: u64) -> Result<()> {
        let source = &self.spec.sources[index];
        if let Some(hashes) = self.hashes {
            key::check(source, &hashes[index], found)?;
        }
        self.lanes[lane].bytes.0 += readers::size(source);
        self.records.insert(index, SourceRecord { path: source.place(), bytes, xxh3: found.into() });
        Ok(())
    }
}

/// The parser of a file, and the sentence that says why it is this one.
fn choose_parser(
    source: &Source,
    reader: &Reader,
    block: Option<&Block>,
    on_error: OnError,
) -> Result<(Parser, String)> {
    let (format, evidence) = match (reader.layout(), source.format) {
        (Layout::Text, FormatChoice::Auto | FormatChoice::Fixed(Format::Text)) => {
            (Format::Text, "a text file: each line is a document, all of it trained on".to_string())
        }
        (Layout::Text, FormatChoice::Fixed(format)) => {
            let problem = format!("a .txt file cannot hold rows of format {}", format.name());
            return Err(Error::new(Kind::Data, source.shown(), problem).wanted("JSON lines, or format = \"text\""));
        }
        (_, FormatChoice::Fixed(format)) => (format, "as the config says".to_string()),
        (_, FormatChoice::Auto) => {
            let Some(block) = block else {
                if on_error == OnError::Skip
                    && let Some(parser) = Format::ALL.into_iter().find_map(|format| Parser::new(format, source).ok())
                {
                    return Ok((parser, "the file holds no rows".to_string()));
                }
                return Err(Error::new(Kind::Data, source.shown(), "the file holds no rows")
                    .wanted("rows to tell the format from")
                    .remedy("leave the file out, or pass over such files with data.on_error = \"skip\""));
            };
            let samples = block.rows().take(SAMPLE_ROWS).map(|(line, bytes)| (line, detect::sample_row(bytes)));
            let (mut rows, mut lines, mut broken): (Vec<Map<String, Json>>, Vec<u64>, _) = (vec![], vec![], None);
            for (line, sample) in samples {
                match sample {
                    Ok(row) => {
                        rows.push(row);
                        lines.push(line);
                    }
                    Err(error) => broken = broken.or(Some((line, error))),
                }
            }
            if let (Some((line, error)), []) = (broken, rows.as_slice()) {
                return Err(row_error(source, line, &error));
            }
            let line = lines.first().map_or(1, |line| *line);
            detect::detect(&rows, source).map_err(|e| row_error(source, line, &e))?
        }
    };
    let parser = Parser::new(format, source)
        .map_err(|problem| Error::new(Kind::Data, format!("{}, [fields]", source.shown()), problem))?;
    Ok((parser, evidence))
}

fn row_error(source: &Source, line: u64, error: &RowError) -> Error {
    let field = if error.field.is_empty() { String::new() } else { format!(", field \"{}\"", error.field) };
    let kind = if error.reason == Reason::TemplateError { Kind::Template } else { Kind::Data };
    Error::new(kind, format!("{}:{line}{field}", source.shown()), &error.problem)
        .wanted(error.wanted.clone())
        .remedy(error.remedy.clone())
}
