//! Data that is prepared while it is trained on: a [`Producer`] makes windows (shards) ahead of the readers, a [`Feed`] gives
//! one reader their packs, and what all readers have behind them is removed. `docs/streaming.md` tells the design.
//!
//! Readers and producer meet in a folder: complete windows with their notes, and a mark of each reader that says where it is.
//! So readers may be other processes of the machine.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::batch::Pack;
use crate::counts::Counts;
use crate::error::{Error, Kind, Result};
use crate::key;
use crate::plan::{Plan, PlanOptions};
use crate::prepare::{Assembly, Observer, Sink, layout};
use crate::readers;
use crate::rows::{Renderer, Rows};
use crate::spec::{Source, Spec};
use crate::store::{Document, Layout, WindowWriter, Windows};
use crate::stream::Packs;

/// How often a folder is looked at by who waits.
const POLL: Duration = Duration::from_millis(10);
/// Attempts at a source that fails, before the last of which the wait is `FIRST_WAIT * 2^(ATTEMPTS - 2)`.
const ATTEMPTS: u32 = 6;

/// The content key of streamed data. The files are not read for it, so of their content only the size counts; a position
/// holds the hash of the window in which it lies, and is refused where that comes out differently.
pub fn key_of(spec: &Spec) -> String {
    let content = |source: &Source| {
        format!("{} bytes {}", readers::size(source), source.remote.as_ref().map_or("", |remote| &remote.etag))
    };
    let sizes: Vec<String> = spec.sources.iter().map(content).collect();
    key::of_inputs(&key::inputs(spec, &sizes))
}

/// A place between two windows, and what it takes to go on there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cursor {
    /// The window behind it.
    pub window: u64,
    /// Packs of the epoch before it.
    pub first_pack: usize,
    /// State of the preparation; none at the very start.
    pub state: Option<Value>,
    /// xxh3-64 of the window behind it, where it was seen.
    pub xxh3: Option<String>,
}

impl Cursor {
    /// The beginning of an epoch.
    pub fn start() -> Cursor {
        Cursor { window: 0, first_pack: 0, state: None, xxh3: None }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it is held leaves nothing half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ---- reading

/// What a reader knows of the windows it has opened.
struct Opened {
    /// Places from the one that the trainer is behind on; the last one is where the next window begins.
    cursors: VecDeque<Cursor>,
    /// Tokens and labels in packs, tokens of the windows, and what became of their documents.
    totals: Totals,
}

/// Sums over the windows that a reader has opened.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Windows.
    pub windows: u64,
    /// Packs.
    pub packs: u64,
    /// Tokens in packs.
    pub tokens: u64,
    /// Labels in packs.
    pub label_tokens: u64,
    /// As of a plan.
    pub counts: Vec<(&'static str, u64)>,
}

/// The windows of an epoch as one reader's packs.
pub struct Feed {
    opened: Arc<Mutex<Opened>>,
    mark: PathBuf,
    packs: Mutex<Option<FeedPacks>>,
}

impl Feed {
    /// A reader of the windows in a folder, from `start` on. `reader`: its number among those of this folder.
    pub fn new(folder: &Path, windows: Windows, options: PlanOptions, reader: usize, start: Cursor) -> Result<Feed> {
        let mark = folder.join(format!("reader-{reader}"));
        write_mark(&mark, start.window, start.window)?;
        let cursors = VecDeque::from([start.clone()]);
        let opened = Arc::new(Mutex::new(Opened { cursors, totals: Totals::default() }));
        let packs = FeedPacks {
            windows,
            options,
            opened: opened.clone(),
            mark: mark.clone(),
            plans: VecDeque::new(),
            next: start.window,
            num_packs: start.first_pack,
            expected: start.xxh3,
            ended: false,
        };
        Ok(Feed { opened, mark, packs: Mutex::new(Some(packs)) })
    }

    /// The packs, once.
    pub fn take_packs(&self) -> Result<Box<dyn Packs>> {
        let taken = locked(&self.packs).take();
        match taken {
            Some(packs) => Ok(Box::new(packs)),
            None => Err(Error::new(Kind::Argument, "feed", "its packs were taken before")),
        }
    }

    /// Where to go on if packs before `pack` are done with: the last place at or before it behind which a window was seen,
    /// so that it can be compared when it is made again.
    pub fn cursor(&self, pack: usize) -> Option<Cursor> {
        let opened = locked(&self.opened);
        let before = |cursor: &&Cursor| cursor.first_pack <= pack;
        let seen = opened.cursors.iter().rev().filter(|cursor| cursor.xxh3.is_some()).find(before);
        seen.or(opened.cursors.iter().rev().find(before)).cloned()
    }

    /// Packs before `pack` are done with: windows that hold no other may go.
    pub fn done(&self, pack: usize) -> Result<()> {
        let mut opened = locked(&self.opened);
        let mut moved = false;
        while opened.cursors.get(1).is_some_and(|next| next.first_pack <= pack && next.xxh3.is_some()) {
            opened.cursors.pop_front();
            moved = true;
        }
        if let Some(first) = opened.cursors.front().filter(|_| moved) {
            let wants = opened.cursors.back().map_or(first.window, |last| last.window);
            write_mark(&self.mark, first.window, wants)?;
        }
        Ok(())
    }

    /// Share of the sources' bytes that went into the packs before `pack`.
    pub fn share(&self, pack: usize) -> f64 {
        let opened = locked(&self.opened);
        let share = |cursor: &Cursor| {
            let bytes = |index: usize| cursor.state.as_ref().and_then(|state| state["bytes"][index].as_f64());
            bytes(0).unwrap_or(0.0) / bytes(1).filter(|all| *all > 0.0).unwrap_or(1.0)
        };
        let behind = opened.cursors.iter().rposition(|cursor| cursor.first_pack <= pack).unwrap_or(0);
        let (Some(from), to) = (opened.cursors.get(behind), opened.cursors.get(behind + 1)) else { return 0.0 };
        let Some(to) = to else { return share(from) };
        let part = pack.saturating_sub(from.first_pack) as f64 / (to.first_pack - from.first_pack).max(1) as f64;
        share(from) + (share(to) - share(from)) * part.min(1.0)
    }

    /// What was read, kept and dropped for the windows that hold the packs before `pack`, as a manifest tells it; none
    /// before the first of them.
    pub fn counts(&self, pack: usize) -> Result<Option<Value>> {
        let opened = locked(&self.opened);
        let Some(cursor) = opened.cursors.iter().find(|cursor| cursor.first_pack >= pack).or(opened.cursors.back())
        else {
            return Ok(None);
        };
        let Some(state) = &cursor.state else { return Ok(None) };
        Counts::from_state(state["counts"].clone()).map(|counts| Some(counts.to_json(totals_of(state), false)))
    }

    /// Sums over the windows so far.
    pub fn totals(&self) -> Totals {
        locked(&self.opened).totals.clone()
    }
}

/// Documents, tokens and trained tokens up to a place.
fn totals_of(state: &Value) -> [u64; 3] {
    std::array::from_fn(|index| state["totals"][index].as_u64().unwrap_or_default())
}

/// A reader is behind window `at`, and waits for all up to `wants`. Called under the reader's lock.
fn write_mark(path: &Path, at: u64, wants: u64) -> Result<()> {
    let temporary = path.with_extension(format!("tmp-{wants}"));
    let write = || {
        fs::write(&temporary, format!("{at} {wants}"))?;
        fs::rename(&temporary, path)
    };
    write().map_err(|e| Error::io(path, "writing", &e))
}

fn read_mark(path: &Path) -> Option<(u64, u64)> {
    let text = fs::read_to_string(path).ok()?;
    let (at, wants) = text.split_once(' ')?;
    Some((at.parse().ok()?, wants.parse().ok()?))
}

struct FeedPacks {
    windows: Windows,
    options: PlanOptions,
    opened: Arc<Mutex<Opened>>,
    mark: PathBuf,
    /// First pack and plan of the windows in use.
    plans: VecDeque<(usize, Plan)>,
    /// The next window to open.
    next: u64,
    num_packs: usize,
    /// Hash that the next window has to have.
    expected: Option<String>,
    ended: bool,
}

impl FeedPacks {
    fn open_next(&mut self) -> Result<bool> {
        let Some(window) = self.windows.open(self.next)? else {
            self.ended = self.windows.known_end()?.is_some_and(|end| self.next >= end);
            return Ok(false);
        };
        if self.expected.take().is_some_and(|expected| expected != window.xxh3) {
            return Err(Error::new(Kind::Data, "streamed data", "the rows are not those that were trained on before")
                .wanted("the same files as when the position was saved")
                .remedy("bring the old data back, or start a new run"));
        }
        let plan = Plan::of_window(Arc::new(window.store), self.options, self.next)?;
        let mut opened = locked(&self.opened);
        if let Some(last) = opened.cursors.back_mut() {
            last.xxh3 = Some(window.xxh3);
        }
        let totals = &mut opened.totals;
        totals.windows += 1;
        totals.packs += plan.num_packs() as u64;
        totals.tokens += plan.num_tokens();
        totals.label_tokens += plan.num_label_tokens();
        let entries = plan.counts().entries();
        totals.counts.resize(entries.len(), ("", 0));
        totals.counts.iter_mut().zip(entries).for_each(|(sum, (name, count))| *sum = (name, sum.1 + count));
        self.next += 1;
        let first_pack = self.num_packs + plan.num_packs();
        opened.cursors.push_back(Cursor { window: self.next, first_pack, state: Some(window.state), xxh3: None });
        drop(opened);
        self.plans.push_back((self.num_packs, plan));
        self.num_packs = first_pack;
        Ok(true)
    }
}

impl Packs for FeedPacks {
    fn options(&self) -> &PlanOptions {
        &self.options
    }

    fn reach(&mut self, end: usize, stopped: &dyn Fn() -> bool) -> Result<Option<usize>> {
        let mut told = false;
        while self.num_packs < end && !self.ended {
            if self.open_next()? || self.ended {
                told = false;
                continue;
            }
            if stopped() {
                return Ok(None);
            }
            if !told {
                // A step may span more windows than are made ahead: what is waited for is made.
                let opened = locked(&self.opened);
                let at = opened.cursors.front().map_or(self.next, |cursor| cursor.window);
                write_mark(&self.mark, at, self.next)?;
                told = true;
            }
            std::thread::sleep(POLL);
        }
        Ok(Some(self.num_packs.min(end)))
    }

    fn pack(&self, index: usize) -> Pack<'_> {
        let at = self.plans.partition_point(|(first, _)| *first <= index) - 1;
        let (first, plan) = &self.plans[at];
        Pack { plan, index: index - first }
    }

    fn leave(&mut self, before: usize) {
        while self.plans.front().is_some_and(|(first, plan)| first + plan.num_packs() <= before) {
            self.plans.pop_front();
        }
    }
}

// ---- making

/// How a producer works.
#[derive(Clone, Debug)]
pub struct ProducerOptions {
    /// Where windows go: a folder that nothing else uses, made here.
    pub folder: PathBuf,
    /// Of the data, as [`key_of`] gave it when the run began.
    pub key: String,
    /// Where to begin.
    pub start: Cursor,
    /// Windows that are made ahead of the slowest reader.
    pub ahead: u64,
    /// Readers of the folder; none of their windows goes before all are known.
    pub readers: usize,
    /// Wait before the second attempt at a source that fails; twice as long before each further one.
    pub first_wait: Duration,
}

/// What a producer is at.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Bytes of the sources read, and of all.
    pub bytes: (u64, u64),
    /// Rows read.
    pub rows: u64,
    /// Windows made.
    pub windows: u64,
    /// What is wrong with a source that is tried again.
    pub trouble: Option<String>,
}

/// Makes windows, on threads of its own.
pub struct Producer {
    stop: Arc<AtomicBool>,
    status: Arc<Mutex<Status>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Producer {
    /// Makes the folder and starts. Readers may come at any time.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn start(spec: Spec, options: ProducerOptions, renderer: Option<Box<dyn Renderer + Send>>) -> Result<Producer> {
        let folder = &options.folder;
        let io = |e: std::io::Error| Error::io(folder, "making the folder of streamed windows", &e);
        fs::create_dir_all(folder).map_err(io)?;
        if spec.dedup {
            return Err(Error::new(Kind::Argument, "stream", "duplicates cannot be dropped from a stream"));
        }
        let total = spec.sources.iter().map(readers::size).sum();
        let status = Arc::new(Mutex::new(Status { bytes: (0, total), ..Status::default() }));
        let stop = Arc::new(AtomicBool::new(false));
        let worker = Worker { stop: stop.clone(), status: status.clone(), spec, options };
        let thread = std::thread::Builder::new()
            .name("rft-feed".into())
            .spawn(move || worker.run(renderer.as_deref().map(|renderer| renderer as &dyn Renderer)))
            .map_err(|e| Error::new(Kind::Io, "stream", format!("cannot start a thread: {e}")))?;
        Ok(Producer { stop, status, thread: Mutex::new(Some(thread)) })
    }

    /// What it is at.
    pub fn status(&self) -> Status {
        locked(&self.status).clone()
    }

    /// Stops and waits for it. Twice is fine.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = locked(&self.thread).take() {
            // Its own panic is told by the readers, who find no end.
            let _ = thread.join();
        }
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Worker {
    stop: Arc<AtomicBool>,
    status: Arc<Mutex<Status>>,
    spec: Spec,
    options: ProducerOptions,
}

/// What stops a preparation whose producer was stopped.
fn stopped() -> Error {
    Error::new(Kind::Argument, "stream", "it was stopped")
}

impl Worker {
    fn run(&self, renderer: Option<&dyn Renderer>) {
        let folder = &self.options.folder;
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.make(renderer)));
        let made = caught.unwrap_or_else(|_| Err(Error::new(Kind::Io, "stream", "the thread that prepares panicked")));
        let told = match made {
            Ok(windows) => Windows::end(folder, windows),
            Err(error) if error == stopped() => Ok(()),
            Err(error) => Windows::fail(folder, &error),
        };
        if let Err(error) = told {
            // The readers' folder cannot be written: then this is all there is to be seen.
            locked(&self.status).trouble = Some(error.to_string());
        }
    }

    /// All windows from the start on, with patience for sources that fail; their number.
    fn make(&self, renderer: Option<&dyn Renderer>) -> Result<u64> {
        let layout = layout(&self.spec, self.options.key.clone());
        let mut from = (self.options.start.window, self.options.start.state.clone());
        let mut attempt = 1;
        loop {
            let mut sink = WindowSink::begin(self, layout.clone(), from.clone())?;
            let error = match sink.prepare(renderer) {
                Ok(()) => return Ok(sink.writer.next()),
                Err(error) => error,
            };
            if sink.writer.next() > from.0 {
                attempt = 1;
            }
            if error.kind != Kind::Io || attempt == ATTEMPTS {
                return Err(error);
            }
            from = (sink.writer.next(), sink.state);
            let wait = self.options.first_wait * 2u32.pow(attempt - 1);
            attempt += 1;
            let told = format!(
                "{}: {}; attempt {attempt} of {ATTEMPTS} in {:.3} s",
                error.place,
                error.problem,
                wait.as_secs_f64()
            );
            locked(&self.status).trouble = Some(told);
            self.wait(wait)?;
        }
    }

    fn wait(&self, time: Duration) -> Result<()> {
        let until = std::time::Instant::now() + time;
        while std::time::Instant::now() < until {
            self.go_on()?;
            std::thread::sleep(POLL.min(time));
        }
        self.go_on()
    }

    fn go_on(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(stopped()) } else { Ok(()) }
    }

    /// The first window that some reader still needs, and the last one that some reader waits for; none while one is missing.
    fn readers(&self) -> Option<(u64, u64)> {
        let marks = (0..self.options.readers).map(|n| read_mark(&self.options.folder.join(format!("reader-{n}"))));
        marks.collect::<Option<Vec<_>>>()?.into_iter().reduce(|(at, wants), mark| (at.min(mark.0), wants.max(mark.1)))
    }
}

/// Cuts windows and waits for the readers in between.
struct WindowSink<'a> {
    worker: &'a Worker,
    writer: WindowWriter,
    /// Behind the last complete window.
    state: Option<Value>,
    /// The first window that may still be on disk.
    oldest: u64,
    /// Bytes of the sources that were read for it, and of all.
    bytes: u64,
    total: u64,
    counts: Option<Counts>,
}

impl<'a> WindowSink<'a> {
    fn begin(worker: &'a Worker, layout: Layout, (window, state): (u64, Option<Value>)) -> Result<WindowSink<'a>> {
        let (mut totals, mut counts) = ([0; 3], Counts::default());
        if let Some(state) = &state {
            totals = totals_of(state);
            counts = Counts::from_state(state["counts"].clone())?;
        }
        let writer = WindowWriter::new(&worker.options.folder, layout, window, totals);
        let (oldest, total) = (worker.options.start.window, worker.spec.sources.iter().map(readers::size).sum());
        Ok(WindowSink { worker, writer, state, oldest, bytes: 0, total, counts: Some(counts) })
    }

    fn prepare(&mut self, renderer: Option<&dyn Renderer>) -> Result<()> {
        let spec = &self.worker.spec;
        let total = self.total;
        let (threads, counts) = (spec.num_threads(), self.counts.take().unwrap_or_default());
        let mut watch = Watch { worker: self.worker };
        let mut assembly = Assembly { spec, sink: self, counts, seen: None };
        assembly.run(&Rows::new(spec, renderer)?, &mut watch, None, threads, total)?;
        let state = assembly.counts.to_state()?;
        self.bytes = self.total;
        if self.writer.is_empty() { Ok(()) } else { self.cut(state) }
    }
}

impl Sink for WindowSink<'_> {
    fn push(&mut self, document: &Document) -> Result<()> {
        self.writer.push(document)
    }

    fn is_full(&self) -> bool {
        self.writer.is_full()
    }

    fn cut(&mut self, counts: Value) -> Result<()> {
        let state = json!({"counts": counts, "totals": self.writer.totals(), "bytes": [self.bytes, self.total]});
        self.writer.cut(state.clone())?;
        self.state = Some(state);
        {
            let mut status = locked(&self.worker.status);
            (status.windows, status.trouble) = (self.writer.next(), None);
        }
        loop {
            self.worker.go_on()?;
            let next = self.writer.next();
            let known = self.worker.readers();
            let (at, wants) = known.unwrap_or((self.worker.options.start.window, 0));
            while self.oldest < at.min(next) {
                Windows::remove(&self.worker.options.folder, self.oldest)?;
                self.oldest += 1;
            }
            if next < at + self.worker.options.ahead || next <= wants {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
    }

    fn totals(&self) -> [u64; 3] {
        self.writer.totals()
    }

    fn reading(&mut self, bytes: u64) {
        self.bytes = bytes;
    }
}

/// Notes how far the preparation is, and ends it when the producer is stopped.
struct Watch<'a> {
    worker: &'a Worker,
}

impl Observer for Watch<'_> {
    fn progress(&mut self, bytes_read: u64, bytes_total: u64, rows: u64) -> Result<()> {
        let mut status = locked(&self.worker.status);
        (status.bytes, status.rows) = ((bytes_read, bytes_total), rows);
        drop(status);
        self.worker.go_on()
    }
}

/// How messages call the sources of a request, by their number.
pub fn names_of(sources: &[Source]) -> Vec<String> {
    sources.iter().map(Source::place).collect()
}
