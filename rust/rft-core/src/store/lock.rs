//! One writer a set: a lock file beside it, which the system lets go of when its holder dies.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};

/// The right to write at a place, for as long as this lives.
pub struct Lock {
    path: PathBuf,
    /// Holds the lock; closed last.
    _file: File,
}

/// `NAME.lock` beside a set.
pub fn lock_path(place: &Path) -> PathBuf {
    let mut name = place.file_name().unwrap_or_default().to_os_string();
    name.push(".lock");
    place.with_file_name(name)
}

impl Lock {
    /// The lock of a place, if no one else holds it.
    pub fn try_take(place: &Path) -> Result<Option<Lock>> {
        let path = lock_path(place);
        loop {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .map_err(|e| Error::io(&path, "creating a lock file", &e))?;
            // SAFETY: the descriptor is open for as long as `file` lives.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
                let error = io::Error::last_os_error();
                return match error.raw_os_error() {
                    Some(libc::EWOULDBLOCK) => Ok(None),
                    Some(libc::EINTR) => continue,
                    _ => {
                        let problem = format!("this file system has no file locks ({error})");
                        Err(Error::new(Kind::Io, path.display().to_string(), problem)
                            .remedy("set data.store to a folder on a local disk"))
                    }
                };
            }
            // Its last holder removes the file: only a lock on the file that still has the name counts.
            let own = file.metadata().map_err(|e| Error::io(&path, "reading", &e))?;
            if fs::metadata(&path).is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())) {
                return Ok(Some(Lock { path, _file: file }));
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
