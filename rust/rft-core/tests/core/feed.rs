//! Windows of streamed data against the same data prepared as a whole.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rft_core::feed::{Cursor, Feed, Producer, ProducerOptions, key_of, names_of};
use rft_core::plan::{Overlong, Packing, Plan, PlanOptions};
use rft_core::spec::Spec;
use rft_core::store::{Store, Windows};
use rft_core::stream::{Share, Slot, Stream};
use serde_json::{Value, json};

use crate::support::{CHATML, Case};

const SEQ_LEN: u32 = 256;
const PACKS: usize = 4;

fn chat(number: usize) -> Value {
    let words = ["alpha", "beta", "gamma", "delta", "epsilon"];
    let text = |n: usize| (0..n % 23 + 1).map(|at| words[(at * 7 + n) % 5]).collect::<Vec<_>>().join(" ");
    json!({"messages": [{"role": "user", "content": text(number)}, {"role": "assistant", "content": text(number * 31 + 7)}]})
}

/// Three files in two data sets of different size and weight, with a bad row in one of them.
fn case(threads: usize) -> Case {
    let mut case = Case::new(&[chat(0)], CHATML).with("threads", json!(threads)).with("on_error", json!("skip"));
    let write = |name: &str, rows: std::ops::Range<usize>| {
        let mut text: Vec<String> = rows.map(|number| chat(number).to_string()).collect();
        text[3] = "{broken".into();
        let path = case.folder.path().join(name);
        std::fs::write(&path, text.join("\n")).unwrap();
        path
    };
    let (a, b, c) = (write("a.jsonl", 0..210), write("b.jsonl", 700..950), write("c.jsonl", 5000..5140));
    case.spec["sources"] = json!([
        {"path": a, "set": 0}, {"path": b, "set": 0}, {"path": c, "set": 1, "weight": 1.5},
    ]);
    case.spec["interleave"] = json!(true);
    case.spec["shard_bytes"] = json!(5000);
    case
}

fn options(epoch: u64) -> PlanOptions {
    let (packing, overlong) = (Packing::Stream, Overlong::Split);
    PlanOptions { seq_len: SEQ_LEN, packing, overlong, seed: 5, epoch, shuffle: true }
}

fn share(rank: usize, world_size: usize) -> Share {
    Share { rank, world_size, micro_batch: 1, packs_per_step: PACKS, first_pack: 0, balance: true }
}

/// Ids and labels of a step's micro-batches.
type Step = Vec<(Vec<i64>, Vec<i64>)>;

struct Ring {
    rows: Vec<[Vec<i64>; 3]>,
    borders: Vec<i32>,
}

impl Ring {
    fn new() -> Ring {
        let row = || vec![0; SEQ_LEN as usize];
        Ring { rows: vec![[row(), row(), row()]], borders: vec![0; SEQ_LEN as usize + 1] }
    }

    /// Ids and labels of each step's micro-batches that are left, up to `steps` of them.
    fn read(&mut self, stream: &Stream, steps: usize) -> Vec<Step> {
        self.try_read(stream, steps).unwrap()
    }

    fn try_read(&mut self, stream: &Stream, steps: usize) -> rft_core::Result<Vec<Step>> {
        let (mut all, mut step) = (Vec::new(), Vec::new());
        while all.len() < steps {
            let [ids, labels, positions] = &mut self.rows[0];
            let slot = Slot {
                number: 0,
                ids: ids.as_mut_ptr() as usize,
                labels: labels.as_mut_ptr() as usize,
                positions: positions.as_mut_ptr() as usize,
                cu_seqlens: self.borders.as_mut_ptr() as usize,
                weights: None,
            };
            // SAFETY: the buffers are as long as the stream's capacity, and nobody touches them until `take` is back.
            unsafe { stream.submit(slot) }.unwrap();
            let Some(taken) = stream.take()? else { break };
            step.push((self.rows[0][0].clone(), self.rows[0][1].clone()));
            if taken.last {
                all.push(std::mem::take(&mut step));
            }
        }
        Ok(all)
    }
}

fn producer(spec: &Spec, folder: &Path, start: Cursor, readers: usize) -> Producer {
    let first_wait = Duration::from_millis(1);
    let key = key_of(spec);
    let options = ProducerOptions { folder: folder.into(), key, start, ahead: 2, readers, first_wait };
    Producer::start(spec.clone(), options, None).unwrap()
}

fn feed(spec: &Spec, folder: &Path, epoch: u64, reader: usize, start: Cursor) -> Feed {
    let windows = Windows::new(folder, &key_of(spec), names_of(&spec.sources));
    Feed::new(folder, windows, options(epoch), reader, start).unwrap()
}

fn stream(feed: &Feed, share: Share, start_step: usize) -> Stream {
    Stream::over(feed.take_packs().unwrap(), share, start_step, -7, SEQ_LEN as usize).unwrap()
}

fn shards_in(folder: &Path) -> usize {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    names.filter(|path: &PathBuf| path.extension().is_some_and(|ending| ending == "rft")).count()
}

#[test]
fn streamed_windows_give_the_steps_of_the_prepared_set_on_any_number_of_threads_and_ranks() {
    let whole = case(3);
    whole.run().unwrap();
    let store = Arc::new(Store::open(&whole.place()).unwrap());
    assert!(store.shards().len() > 8, "{} shards", store.shards().len());
    for (epoch, threads, world_size) in [(0, 1, 1), (1, 4, 2)] {
        let plan = Arc::new(Plan::windowed(store.clone(), options(epoch)).unwrap());
        let streamed = case(threads);
        let spec = streamed.parsed();
        let folder = streamed.folder.path().join("windows");
        let producer = producer(&spec, &folder, Cursor::start(), world_size);
        let feeds: Vec<Feed> = (0..world_size).map(|rank| feed(&spec, &folder, epoch, rank, Cursor::start())).collect();
        let wholes: Vec<Stream> = (0..world_size)
            .map(|rank| Stream::new(plan.clone(), share(rank, world_size), 0, -7, SEQ_LEN as usize).unwrap())
            .collect();
        let parts: Vec<Stream> =
            feeds.iter().zip(0..).map(|(feed, rank)| stream(feed, share(rank, world_size), 0)).collect();
        let (mut steps, mut shares) = (0, Vec::new());
        loop {
            let wanted: Vec<_> = wholes.iter().map(|stream| Ring::new().read(stream, 1)).collect();
            let got: Vec<_> = parts.iter().map(|stream| Ring::new().read(stream, 1)).collect();
            assert!(wanted == got, "step {steps} of epoch {epoch} differs");
            if wanted[0].is_empty() {
                break;
            }
            steps += 1;
            shares.push(feeds[0].share(steps * PACKS));
            feeds.iter().for_each(|feed| feed.done(steps * PACKS).unwrap());
            assert!(shards_in(&folder) <= 5, "{} windows on disk after step {steps}", shards_in(&folder));
        }
        assert_eq!(steps, plan.num_packs().div_ceil(PACKS));
        assert_eq!(feeds[0].totals().packs as usize, plan.num_packs());
        assert_eq!(feeds[0].totals().windows as usize, store.shards().len());
        let counts = feeds[0].counts(plan.num_packs()).unwrap().unwrap();
        for name in ["read", "kept", "dropped", "documents", "tokens", "trained_tokens", "repeats", "sources"] {
            let own = |entry: &Value| entry.to_string().replace(&whole.folder.path().display().to_string(), "");
            let theirs = |entry: &Value| entry.to_string().replace(&streamed.folder.path().display().to_string(), "");
            assert_eq!(own(&store.manifest().counts[name]), theirs(&counts[name]), "{name}");
        }
        assert!((feeds[0].share(plan.num_packs()) - 1.0).abs() < 1e-9);
        assert!(shares.is_sorted() && shares[steps / 2] > 0.3 && shares[steps / 2] < 0.7, "{shares:?}");
        producer.stop();
    }
}

#[test]
fn data_sets_are_read_side_by_side() {
    let whole = case(2);
    whole.run().unwrap();
    let store = Store::open(&whole.place()).unwrap();
    // Of each shard, the share of documents from the second data set is near its share of all.
    let of_second = |range: std::ops::Range<usize>| {
        range.clone().filter(|index| store.origin(*index).0.ends_with("c.jsonl")).count() as f64 / range.len() as f64
    };
    let all = of_second(0..store.num_documents());
    let half = store.num_documents() / 2;
    for part in [0..half, half..store.num_documents()] {
        assert!((of_second(part.clone()) - all).abs() < 0.15, "{part:?}: {} of {all}", of_second(part.clone()));
    }
}

#[test]
fn every_cursor_goes_on_to_the_same_steps() {
    let streamed = case(2);
    let spec = streamed.parsed();
    let folder = streamed.folder.path().join("first");
    let first = producer(&spec, &folder, Cursor::start(), 1);
    let reader = feed(&spec, &folder, 0, 0, Cursor::start());
    let packs = stream(&reader, share(0, 1), 0);
    let (mut steps, mut cursors) = (Vec::new(), vec![Cursor::start()]);
    loop {
        let mut step = Ring::new().read(&packs, 1);
        let Some(step) = step.pop() else { break };
        steps.push(step);
        cursors.push(reader.cursor(steps.len() * PACKS).unwrap());
        reader.done(steps.len() * PACKS).unwrap();
    }
    first.stop();
    assert!(cursors.last().unwrap().window > 8);
    for start in [1, steps.len() / 3, steps.len() / 2 + 1, steps.len() - 1, steps.len()] {
        // As a checkpoint keeps it.
        let cursor: Cursor = serde_json::from_str(&serde_json::to_string(&cursors[start]).unwrap()).unwrap();
        let folder = streamed.folder.path().join(format!("from-{start}"));
        let again = producer(&spec, &folder, cursor.clone(), 1);
        let reader = feed(&spec, &folder, 0, 0, cursor);
        let got = Ring::new().read(&stream(&reader, share(0, 1), start), usize::MAX);
        assert!(got == steps[start..], "from step {start}");
        again.stop();
    }
}

#[test]
fn rows_that_changed_behind_a_position_are_refused() {
    let streamed = case(2);
    let spec = streamed.parsed();
    let folder = streamed.folder.path().join("first");
    let first = producer(&spec, &folder, Cursor::start(), 1);
    let reader = feed(&spec, &folder, 0, 0, Cursor::start());
    Ring::new().read(&stream(&reader, share(0, 1), 0), 3);
    let cursor = reader.cursor(3 * PACKS).unwrap();
    first.stop();
    // The same length, other letters.
    let path = streamed.folder.path().join("a.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("gamma", "GAMMA")).unwrap();
    let folder = streamed.folder.path().join("again");
    let again = producer(&spec, &folder, cursor.clone(), 1);
    let reader = feed(&spec, &folder, 0, 0, cursor);
    let packs = stream(&reader, share(0, 1), 3);
    let error = Ring::new().try_read(&packs, 1).unwrap_err();
    assert!(error.problem.contains("not those that were trained on"), "{error}");
    packs.close();
    again.stop();
}

#[test]
fn a_source_that_fails_is_tried_again_and_then_told_once_all_before_it_was_given() {
    let streamed = case(2);
    let missing = streamed.folder.path().join("b.jsonl");
    let hidden = streamed.folder.path().join("hidden");
    std::fs::rename(&missing, &hidden).unwrap();
    let mut spec = streamed.parsed();
    spec.interleave = false;
    for comes_back in [true, false] {
        let folder = streamed.folder.path().join(format!("windows-{comes_back}"));
        let options = ProducerOptions {
            folder: folder.clone(),
            key: key_of(&spec),
            start: Cursor::start(),
            ahead: 100,
            readers: 1,
            first_wait: Duration::from_millis(if comes_back { 30 } else { 1 }),
        };
        let producer = Producer::start(spec.clone(), options, None).unwrap();
        let reader = feed(&spec, &folder, 0, 0, Cursor::start());
        let packs = stream(&reader, share(0, 1), 0);
        let before = Ring::new().read(&packs, 2);
        assert_eq!(before.len(), 2);
        if comes_back {
            while producer.status().trouble.is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(producer.status().trouble.unwrap().contains("b.jsonl"));
            std::fs::rename(&hidden, &missing).unwrap();
            assert!(!Ring::new().read(&packs, usize::MAX).is_empty());
            let counts = reader.counts(usize::MAX).unwrap().unwrap();
            assert_eq!((&counts["read"], &counts["dropped"]["bad row"]), (&json!(600), &json!(3)));
            std::fs::rename(&missing, &hidden).unwrap();
        } else {
            let told = Ring::new().try_read(&packs, usize::MAX).unwrap_err();
            assert!(told.place.contains("b.jsonl"), "{told}");
        }
        packs.close();
        producer.stop();
    }
}
