//! Files of S3, Google Cloud Storage, Azure and web servers, fetched whole into a cache on disk.
//!
//! A file is fetched in ranges, several at a time, each tied to the state (ETag) that was seen first; what a cut connection
//! left is taken up again. A cached file is complete or absent, has a checksum beside it that is compared when it is used, and is
//! removed when others need its room: the one used longest ago first.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream as futures};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig,
};
use serde::{Deserialize, Serialize};
use url::Url;
use xxhash_rust::xxh3::xxh3_128;

use super::stream;
use crate::error::{Error, Kind, Result};

/// Bytes of one request: seconds even on a slow line, so that little is lost when it is cut.
const CHUNK_BYTES: u64 = 8 << 20;
/// Requests at a time.
const AT_ONCE: usize = 4;
/// Attempts at one range whose answer is cut short or wrong; refused connections and 5xx are tried again below this.
const ATTEMPTS: u32 = 5;
/// States of an object that are begun before it counts as one that never rests.
const STATES: u32 = 3;

/// What is known of a cached file.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Note {
    url: String,
    etag: Option<String>,
    size: u64,
    xxh3: String,
}

/// Where a URL points.
struct Place {
    url: String,
    store: Arc<dyn ObjectStore>,
    path: Path,
}

/// Told what is done and what there is in all, in bytes; an error ends the call.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> Result<()>;

/// Every object below a folder (`s3://bucket/folder/`): URL and size, sorted. Web servers list nothing.
///
/// # Errors
/// The store cannot be reached or says no; the scheme is not one of these.
pub fn list(folder: &str) -> Result<Vec<(String, u64)>> {
    let place = Place::of(folder)?;
    let base = folder.strip_suffix(place.path.as_ref()).or(folder.strip_suffix(&format!("{}/", place.path)));
    let Some(base) = base.filter(|_| !is_web(folder)) else {
        return Err(Error::new(Kind::Data, folder, "a web server does not list its files")
            .wanted("the URL of one file, or a folder of s3://, gs:// or az://"));
    };
    let found: Vec<ObjectMeta> = runtime()?
        .block_on(place.store.list(Some(&place.path)).try_collect())
        .map_err(|e| failed(folder, "listing", &e))?;
    let mut found: Vec<_> = found.into_iter().map(|meta| (format!("{base}{}", meta.location), meta.size)).collect();
    found.sort();
    Ok(found)
}

/// Size and ETag (or time of change) of each URL.
///
/// # Errors
/// As of [`fetch`].
pub fn states(urls: &[String]) -> Result<Vec<(u64, String)>> {
    let runtime = runtime()?;
    let state = |url: &String| {
        let meta = runtime.block_on(Place::of(url)?.head())?;
        Ok((meta.size, meta.e_tag.unwrap_or_else(|| meta.last_modified.to_rfc3339())))
    };
    urls.iter().map(state).collect()
}

/// Files with the content of these URLs, from the cache where it has them. No more than `limit` bytes are kept in all.
///
/// # Errors
/// They do not fit; the store cannot be reached, says no, or gives something else each time; the disk is full.
pub fn fetch(urls: &[String], cache: &FilePath, limit: u64, progress: Progress) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(cache).map_err(|e| Error::io(cache, "making the folder", &e))?;
    let runtime = runtime()?;
    let places = urls.iter().map(|url| Place::of(url)).collect::<Result<Vec<_>>>()?;
    let metas = places.iter().map(|place| runtime.block_on(place.head())).collect::<Result<Vec<_>>>()?;
    let total: u64 = metas.iter().map(|meta| meta.size).sum();
    if total > limit {
        let problem = format!("these files take {}, the cache may take {}", gigabytes(total), gigabytes(limit));
        return Err(Error::new(Kind::Data, urls.first().map_or("", String::as_str), problem)
            .remedy("raise data.cache_gb, or download a part and give the local path"));
    }
    let mut kept: HashSet<String> =
        places.iter().zip(&metas).map(|(place, meta)| hash_in(&place.cached(meta, cache))).collect();
    let (mut files, mut done) = (Vec::new(), 0);
    for (place, meta) in places.iter().zip(metas) {
        let mut told = |bytes: u64| progress(done + bytes, total);
        let (file, size) = runtime.block_on(place.fetch_into_cache(meta, cache, limit, &mut kept, &mut told))?;
        done += size;
        files.push(file);
    }
    Ok(files)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::new(Kind::Io, "remote data", format!("cannot start: {e}")))
}

fn is_web(url: &str) -> bool {
    url.starts_with("http://") || url.starts_with("https://")
}

impl Place {
    fn of(url: &str) -> Result<Place> {
        // Stores make their client at once, which needs it. A second call finds it set, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let bad = |problem: String| {
            Error::new(Kind::Data, url, problem)
                .wanted("s3://bucket/key, gs://bucket/key, az://container/key or https://...")
        };
        let parsed = Url::parse(url).map_err(|e| bad(format!("no URL: {e}")))?;
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100),
                max_backoff: Duration::from_secs(5),
                base: 2.0,
            },
            max_retries: 5,
            retry_timeout: Duration::from_secs(60),
        };
        let options = ClientOptions::default().with_allow_http(true).with_timeout(Duration::from_secs(120));
        let wrong = |e: &object_store::Error| bad(format!("cannot be opened: {}", told(e)));
        let store: Arc<dyn ObjectStore> = match parsed.scheme() {
            "s3" | "s3a" => Arc::new(
                AmazonS3Builder::from_env()
                    .with_url(url)
                    .with_retry(retry)
                    .with_client_options(options)
                    .build()
                    .map_err(|e| wrong(&e))?,
            ),
            "gs" => Arc::new(
                GoogleCloudStorageBuilder::from_env()
                    .with_url(url)
                    .with_retry(retry)
                    .with_client_options(options)
                    .build()
                    .map_err(|e| wrong(&e))?,
            ),
            "az" | "abfs" | "abfss" => Arc::new(
                MicrosoftAzureBuilder::from_env()
                    .with_url(url)
                    .with_retry(retry)
                    .with_client_options(options)
                    .build()
                    .map_err(|e| wrong(&e))?,
            ),
            // The whole URL, as it is signed or not: a path of its own would lose what stands after "?".
            "http" | "https" => Arc::new(
                HttpBuilder::new()
                    .with_url(url)
                    .with_retry(retry)
                    .with_client_options(options)
                    .build()
                    .map_err(|e| wrong(&e))?,
            ),
            other => return Err(bad(format!("the scheme {other}:// is not known"))),
        };
        let key = if is_web(url) { "" } else { parsed.path() };
        let path = Path::from_url_path(key).map_err(|e| bad(format!("no path: {e}")))?;
        Ok(Place { url: url.to_string(), store, path })
    }

    async fn head(&self) -> Result<ObjectMeta> {
        self.store.head(&self.path).await.map_err(|e| failed(&self.url, "asking for it", &e))
    }

    /// The file in the cache that this state of the object has: its name ends as the object's does.
    fn cached(&self, meta: &ObjectMeta, cache: &FilePath) -> PathBuf {
        let state = meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339());
        let hash = xxh3_128(format!("{}\n{state}\n{}", self.url, meta.size).as_bytes());
        let name = self.url.split(['?', '#']).next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
        let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c)).collect();
        cache.join(format!("{hash:032x}-{}", &name[name.len().saturating_sub(100)..]))
    }

    async fn fetch_into_cache(
        &self,
        mut meta: ObjectMeta,
        cache: &FilePath,
        limit: u64,
        kept: &mut HashSet<String>,
        told: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<(PathBuf, u64)> {
        for _ in 0..STATES {
            let file = self.cached(&meta, cache);
            kept.insert(hash_in(&file));
            let _lock = lock(&beside(&file, "lock"))?;
            if is_whole(&file, meta.size)? {
                touch(&file);
                told(meta.size)?;
                return Ok((file, meta.size));
            }
            make_room(cache, limit.saturating_sub(meta.size), kept)?;
            if self.download(&meta, &file, told).await? {
                return Ok((file, meta.size));
            }
            let _ = fs::remove_file(beside(&file, "part"));
            meta = self.head().await?;
        }
        Err(Error::new(Kind::Data, &self.url, format!("it changed {STATES} times while it was fetched"))
            .remedy("fetch it when nothing writes to it"))
    }

    /// Fetches into `file`; false if the object has another state by now.
    async fn download(
        &self,
        meta: &ObjectMeta,
        file: &FilePath,
        told: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<bool> {
        let part = beside(file, "part");
        let io = |e: io::Error| Error::io(&part, "writing", &e);
        let mut out = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&part).map_err(io)?;
        // Whole ranges only: the last one written before a crash may be half there.
        let mut done = out.metadata().map_err(io)?.len().min(meta.size) / CHUNK_BYTES * CHUNK_BYTES;
        out.set_len(done).map_err(io)?;
        out.seek(SeekFrom::Start(done)).map_err(io)?;
        let starts = (done..meta.size).step_by(CHUNK_BYTES as usize);
        let ranges = starts.map(|start| start..(start + CHUNK_BYTES).min(meta.size));
        let mut chunks = futures::iter(ranges).map(|range| self.range(meta, range)).buffered(AT_ONCE);
        while let Some(chunk) = chunks.next().await {
            let Some(bytes) = chunk? else { return Ok(false) };
            out.write_all(&bytes).map_err(io)?;
            done += bytes.len() as u64;
            told(done)?;
        }
        drop(chunks);
        out.sync_all().map_err(io)?;
        out.rewind().map_err(io)?;
        let (hash, size) = stream::hash_of(&mut out, &part, &self.url)?;
        let note = Note { url: self.url.clone(), etag: meta.e_tag.clone(), size, xxh3: crate::key::hex(hash) };
        let text = serde_json::to_vec(&note).map_err(|e| Error::new(Kind::Io, &self.url, e))?;
        fs::write(beside(file, "json"), text).map_err(|e| Error::io(file, "writing", &e))?;
        fs::rename(&part, file).map_err(io)?;
        Ok(true)
    }

    /// The bytes of a range, none if the object has another state by now.
    async fn range(&self, meta: &ObjectMeta, range: std::ops::Range<u64>) -> Result<Option<Vec<u8>>> {
        let mut problem = String::new();
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                tokio::time::sleep(Duration::from_millis(100 << attempt)).await;
            }
            let options = GetOptions {
                range: (range.end - range.start < meta.size).then(|| GetRange::Bounded(range.clone())),
                if_match: meta.e_tag.clone(),
                ..GetOptions::default()
            };
            let result = match self.store.get_opts(&self.path, options).await {
                Ok(result) => result,
                Err(object_store::Error::Precondition { .. }) => return Ok(None),
                Err(
                    error @ (object_store::Error::NotFound { .. }
                    | object_store::Error::PermissionDenied { .. }
                    | object_store::Error::Unauthenticated { .. }),
                ) => return Err(failed(&self.url, "fetching", &error)),
                Err(error) => {
                    problem = told(&error);
                    continue;
                }
            };
            let other_state = result.meta.size != meta.size
                || (meta.e_tag.is_some() && result.meta.e_tag.is_some() && result.meta.e_tag != meta.e_tag)
                || (meta.e_tag.is_none() && result.meta.last_modified != meta.last_modified);
            if other_state {
                return Ok(None);
            }
            match result.bytes().await {
                Ok(bytes) if bytes.len() as u64 == range.end - range.start => return Ok(Some(bytes.into())),
                Ok(bytes) => {
                    problem = format!("{} bytes came in place of {}", bytes.len(), range.end - range.start);
                }
                Err(error) => problem = told(&error),
            }
        }
        let part = if range.start == 0 { String::new() } else { format!(" from byte {} on", range.start) };
        Err(Error::new(Kind::Io, &self.url, format!("cannot be fetched{part}, in {ATTEMPTS} attempts: {problem}"))
            .remedy("try again: what has come is kept"))
    }
}

/// What went wrong, in one line, without what the library says of its own making.
fn told(error: &object_store::Error) -> String {
    let mut text = error.to_string().replace('\n', " ");
    if text.len() > 400 {
        let end = (0..=400).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}

fn failed(url: &str, doing: &str, error: &object_store::Error) -> Error {
    use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
    match error {
        NotFound { .. } => Error::new(Kind::Data, url, "there is no such file"),
        PermissionDenied { .. } | Unauthenticated { .. } => Error::new(Kind::Data, url, "access is denied")
            .remedy("set the variables that this store's own tools read (AWS_..., GOOGLE_..., AZURE_...); AWS_SKIP_SIGNATURE=true for public buckets"),
        other => Error::new(Kind::Io, url, format!("{doing} failed: {}", told(other))),
    }
}

/// Digits of the hash that a file's name in the cache begins with; behind them "-" and the object's name.
const DIGITS: usize = 32;

/// A file of our own for a file in the cache: its hash and an ending. No object's name can look like that, since behind the
/// hash of one comes "-".
fn beside(file: &FilePath, ending: &str) -> PathBuf {
    file.with_file_name(format!("{}.{ending}", hash_in(file)))
}

/// The hash in the name of a file of the cache, or of one beside it; the whole name where it holds none.
fn hash_in(file: &FilePath) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.get(..DIGITS).unwrap_or(&name).to_string()
}

/// Held until it is dropped. Its file stays: removing it would let two processes hold it.
fn lock(path: &FilePath) -> Result<File> {
    let io = |e: io::Error| Error::io(path, "locking", &e);
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(io)?;
    while !flock(&file, libc::LOCK_EX) {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(io(error));
        }
    }
    Ok(file)
}

/// Whether a file has the length and the checksum that were noted when it was fetched.
fn is_whole(file: &FilePath, size: u64) -> Result<bool> {
    let Ok(text) = fs::read(beside(file, "json")) else { return Ok(false) };
    let Ok(note) = serde_json::from_slice::<Note>(&text) else { return Ok(false) };
    let Ok(opened) = File::open(file) else { return Ok(false) };
    let (hash, found) = stream::hash_of(opened, file, &file.display().to_string())?;
    Ok(found == size && note.size == size && note.xxh3 == crate::key::hex(hash))
}

/// The time of last use.
fn touch(file: &FilePath) {
    if let Ok(file) = OpenOptions::new().append(true).open(file) {
        let _ = file.set_modified(std::time::SystemTime::now());
    }
}

/// Keeps a cached file from being removed for others until what is returned is dropped. None where the system does not say.
pub(super) fn in_use(file: &FilePath) -> Option<File> {
    let file = File::open(file).ok()?;
    flock(&file, libc::LOCK_SH | libc::LOCK_NB).then_some(file)
}

fn flock(file: &File, how: libc::c_int) -> bool {
    // SAFETY: flock takes the descriptor of an open file and touches no memory.
    unsafe { libc::flock(file.as_raw_fd(), how) == 0 }
}

/// Removes the files used longest ago until no more than `most` bytes are left, but none of `kept` (hashes) and none that is
/// being read, which count too.
///
/// # Errors
/// It cannot be, because of files that are being read.
fn make_room(cache: &FilePath, most: u64, kept: &HashSet<String>) -> Result<()> {
    let mut files = Vec::new();
    for entry in fs::read_dir(cache).map_err(|e| Error::io(cache, "reading", &e))?.flatten() {
        let path = entry.path();
        let Ok(meta) = entry.metadata() else { continue };
        // Those beside a file are a few bytes each, except the part that has come.
        let small = [beside(&path, "json"), beside(&path, "lock")].contains(&path);
        if meta.is_file() && !small {
            files.push((meta.modified().unwrap_or(std::time::UNIX_EPOCH), meta.len(), path));
        }
    }
    files.sort();
    let mut held: u64 = files.iter().map(|(_, size, _)| size).sum();
    let (mut reading, mut bytes_reading) = (0, 0);
    for (_, size, path) in files {
        if held <= most {
            break;
        }
        if kept.contains(&hash_in(&path)) {
            continue;
        }
        // One that another process fetches now is not for us to remove.
        if let Ok(lock) = OpenOptions::new().create(true).truncate(false).write(true).open(beside(&path, "lock")) {
            if !flock(&lock, libc::LOCK_EX | libc::LOCK_NB) {
                continue;
            }
            if File::open(&path).is_ok_and(|file| !flock(&file, libc::LOCK_EX | libc::LOCK_NB)) {
                (reading, bytes_reading) = (reading + 1, bytes_reading + size);
                continue;
            }
            if fs::remove_file(&path).is_ok() {
                held = held.saturating_sub(size);
            }
            let _ = fs::remove_file(beside(&path, "json"));
        }
    }
    if held > most && reading > 0 {
        let problem = format!(
            "there is no room for the next file beside those that are being read: {reading} with {}",
            gigabytes(bytes_reading)
        );
        return Err(Error::new(Kind::Data, cache.display().to_string(), problem)
            .wanted("room for the largest file of each data set that is streamed, all at once")
            .remedy("raise data.cache_gb, or put the files of several data sets into one"));
    }
    Ok(())
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.3} GB", bytes as f64 / 1e9)
}
