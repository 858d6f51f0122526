//! Blocks of rows -> documents, on several threads, handed back in the order of the blocks.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::template::with_room;

/// How often the caller is heard while no result comes.
const TICK: Duration = Duration::from_millis(100);

/// Calls `work` for every item of `next` on `threads` threads, and `done` for the results, in the order of the items.
///
/// `state` makes what each thread keeps from item to item. `tick` is called while the wait is long. At most 2 items a
/// thread, and two more, are under way. An error of `next` or `work` is that of its place: what comes before it is
/// handed to `done` first. The first error ends all.
pub fn in_order<I: Send, O: Send, S>(
    threads: usize,
    mut next: impl FnMut() -> Result<Option<I>>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(I, &mut S) -> Result<O> + Sync,
    mut done: impl FnMut(O) -> Result<()>,
    mut tick: impl FnMut() -> Result<()>,
) -> Result<()> {
    if threads <= 1 {
        let mut own = state();
        while let Some(item) = next()? {
            done(with_room(|| work(item, &mut own))?)?;
        }
        return Ok(());
    }
    let (items, inbox) = mpsc::channel::<(u64, I)>();
    let (outbox, results) = mpsc::channel::<(u64, Result<O>)>();
    let inbox = Mutex::new(inbox);
    std::thread::scope(|scope| {
        for index in 0..threads {
            let (outbox, inbox, state, work) = (outbox.clone(), &inbox, &state, &work);
            std::thread::Builder::new()
                .name(format!("rft-prepare-{index}"))
                .spawn_scoped(scope, move || {
                    let mut own = state();
                    loop {
                        let received = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
                        let Ok((number, item)) = received else { return };
                        // A panic must come back as a result: the others would wait for this one for ever.
                        let block = AssertUnwindSafe(|| with_room(|| work(item, &mut own)));
                        let made = catch_unwind(block).unwrap_or_else(|_| {
                            Err(Error::new(
                                Kind::Io,
                                "prepare",
                                "a thread that works on rows panicked (its message is above)",
                            ))
                        });
                        if outbox.send((number, made)).is_err() {
                            return;
                        }
                    }
                })
                .map_err(|e| Error::new(Kind::Io, "prepare", format!("cannot start threads: {e}")))?;
        }
        drop(outbox);
        // Owned here, so that every way out closes it and the threads end.
        let items = items;
        let (mut sent, mut handed) = (0u64, 0u64);
        let mut early = BTreeMap::new();
        let mut end: Option<Result<()>> = None;
        loop {
            while end.is_none() && sent - handed < 2 * threads as u64 + 2 {
                match next() {
                    Ok(Some(item)) => {
                        let _ = items.send((sent, item));
                        sent += 1;
                    }
                    Ok(None) => end = Some(Ok(())),
                    Err(error) => end = Some(Err(error)),
                }
            }
            if sent == handed {
                return end.unwrap_or(Ok(()));
            }
            match results.recv_timeout(TICK) {
                Ok((number, result)) => {
                    early.insert(number, result);
                }
                Err(RecvTimeoutError::Timeout) => tick()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(Kind::Io, "prepare", "a thread ended early"));
                }
            }
            while let Some(result) = early.remove(&handed) {
                handed += 1;
                done(result?)?;
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(threads: usize, fail_next: Option<u64>, fail_work: Option<u64>) -> (Vec<u64>, Option<String>) {
        let mut items = 0..100u64;
        let mut got = Vec::new();
        let failed = |n: u64| Error::new(Kind::Data, format!("{n}"), "no");
        let result = in_order(
            threads,
            || match items.next() {
                Some(n) if Some(n) == fail_next => Err(failed(n)),
                n => Ok(n),
            },
            || 0u64,
            |n, own| {
                *own += 1;
                std::thread::sleep(Duration::from_micros(n * 7919 % 300));
                if Some(n) == fail_work { Err(failed(n)) } else { Ok(n) }
            },
            |n| {
                got.push(n);
                Ok(())
            },
            || Ok(()),
        );
        (got, result.err().map(|error| error.place))
    }

    #[test]
    fn a_panic_is_an_error_and_no_wait_for_ever() {
        let mut items = 0..20u64;
        let result = in_order(
            2,
            || Ok(items.next()),
            || (),
            |n, ()| if n == 7 { panic!("by the test") } else { Ok(n) },
            |_| Ok(()),
            || Ok(()),
        );
        assert!(result.expect_err("a panic").problem.contains("panicked"));
    }

    #[test]
    fn results_come_in_order_and_errors_at_their_place() {
        for threads in [1, 2, 5] {
            assert_eq!(run(threads, None, None), ((0..100).collect(), None));
            assert_eq!(run(threads, Some(40), None), ((0..40).collect(), Some("40".into())));
            assert_eq!(run(threads, None, Some(7)), ((0..7).collect(), Some("7".into())));
            assert_eq!(run(threads, Some(40), Some(39)), ((0..39).collect(), Some("39".into())));
        }
    }

    #[test]
    fn a_wait_is_interrupted() {
        let mut left = Some(1);
        let told = in_order(
            2,
            || Ok(left.take()),
            || (),
            |_, ()| {
                std::thread::sleep(Duration::from_millis(250));
                Ok(())
            },
            |()| Ok(()),
            || Err(Error::new(Kind::Argument, "", "stop")),
        );
        assert_eq!(told.err().map(|error| error.problem).as_deref(), Some("stop"));
    }
}
