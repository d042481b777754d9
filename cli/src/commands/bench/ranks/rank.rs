//! What the process of one rank does.

use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use kvpack::backend::{AttentionStates, Device};
use kvpack::cpu::nmse;
use kvpack::cuda::cudarc::driver::CudaEvent;
use kvpack::cuda::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use kvpack::cuda::cudarc::driver::sys::CUgraphInstantiate_flags;
use kvpack::cuda::cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
use kvpack::cuda::nccl::{Nccl, NcclId};
use kvpack::cuda::peer::{Peer, PeerHandle, PeerSlots};
use kvpack::cuda::{Cuda, Tensor};
use kvpack::plan::{ElementType, Elements};
use kvpack::ranks::{StateExchange, Transport};
use kvpack::{AttentionShape, Error, SegmentFormat};
use kvpack_report::{ExchangeRow, Median, RanksFound, RanksRow, Skipped};

use super::meeting::Meeting;
use super::share::{Contents, Sequence, Share};
use super::{MOST_NMSE, MOST_TOKENS, formats, lengths, worlds};
use crate::commands::bench::timed::random_rows;
use crate::outcome::Wrong;
use crate::print::note;

/// Rows of queries whose states are exchanged alone: 16.5, 264 and 1056 KB.
const EXCHANGED_ROWS: [usize; 3] = [1, 16, 64];

/// Deadline of the transports: ranks compile and capture at their own pace.
const DEADLINE: Duration = Duration::from_secs(20);

/// Layers of the longest sequence in f16 that exceed one GPU, and fit two: 192 GiB.
const LAYERS: usize = 12;

/// Attempts to time a row whose samples lie far apart, and how far they may, in percent.
const ATTEMPTS: usize = 3;
const STEADY: f64 = 1.5;

/// Steps of a graph, at least.
const STEPS: usize = 32;

/// Seconds of timed replays, and of those before them.
const SECONDS: f64 = 0.1;

/// Replays of a graph that are timed.
const REPLAYS: (f64, f64) = (5.0, 50.0);

/// A process of the suite.
pub struct Process {
    meeting: Meeting,
    backend: Cuda,
    shape: AttentionShape,
    queries: Tensor,
    output: Tensor,
}

/// The transports of a number of ranks.
struct Links {
    peer: std::result::Result<Peer, String>,
    nccl: std::result::Result<Nccl, String>,
}

impl Process {
    /// # Errors
    /// Errors of the device.
    pub fn new(meeting: Meeting, backend: Cuda, shape: AttentionShape) -> Result<Self> {
        let elements = shape.query_heads() * shape.head_dim();
        let queries = Tensor::upload(backend.stream(), Elements::F16(&random_rows(elements, usize::MAX, 3)))?;
        let output = Tensor::zeroed(backend.stream(), elements, ElementType::F32)?;
        Ok(Self { meeting, backend, shape, queries, output })
    }

    /// Measures everything. What rank 0 found is the result.
    ///
    /// # Errors
    /// When the device or another rank fails; [`Wrong`] for outputs that differ.
    pub async fn run(mut self) -> Result<()> {
        let mut found = RanksFound { backend: self.backend.name(), ..RanksFound::default() };
        let contents = Contents::new(&self.backend, &self.shape)?;
        let worlds = worlds(self.meeting.ranks);
        let mut links = Vec::new();
        for &ranks in worlds.iter().filter(|&&ranks| ranks > 1) {
            let mut link = self.connect(ranks)?;
            self.time_exchanges(&mut link, ranks, &mut found).await?;
            links.push((ranks, link));
        }
        for tokens in lengths() {
            for (name, format) in formats() {
                let sequence = Sequence { shape: self.shape, tokens, format, layers: None };
                let mut one = None;
                for &ranks in &worlds {
                    let link = links.iter_mut().find(|(of, _)| *of == ranks).map(|(_, link)| link);
                    self.time_sequence(&contents, (sequence, name), (ranks, link), &mut one, &mut found).await?;
                }
                // Once more with layers that no GPU of today holds.
                if tokens == MOST_TOKENS && format == SegmentFormat::F16 && self.meeting.ranks > 1 {
                    let link = links.iter_mut().find(|(of, _)| *of == 2).map(|(_, link)| link);
                    let deep = Sequence { layers: Some(LAYERS), ..sequence };
                    self.time_sequence(&contents, (deep, name), (2, link), &mut one, &mut found).await?;
                }
            }
        }
        self.meeting.end(&serde_json::to_string(&found)?)
    }

    /// Whether this process is one of the first `ranks`.
    fn is_one_of(&self, ranks: usize) -> bool {
        self.meeting.rank < ranks
    }

    /// Connects the first `ranks` ranks in both ways.
    fn connect(&self, ranks: usize) -> Result<Option<Links>> {
        let (rank, most) = (self.meeting.rank, EXCHANGED_ROWS.into_iter().max().unwrap_or(1));
        let id = if rank == 0 { NcclId::new().map(|id| hex(&id.to_bytes())) } else { Ok(String::new()) };
        let id = self.meeting.of(0, &id.unwrap_or_else(|error| format!("no: {error}")))?;
        let slots = self
            .is_one_of(ranks)
            .then(|| PeerSlots::new(&self.backend, (rank, ranks), PeerSlots::words_of_states(&self.shape, most)));
        let slots = slots.transpose()?;
        let handles =
            self.meeting.meet(&slots.as_ref().map_or(String::new(), |slots| hex(&slots.handle().to_bytes())))?;
        let Some(slots) = slots else {
            self.meeting.meet("beside")?;
            return Ok(None);
        };
        let handles = handles[..ranks].iter().map(|text| PeerHandle::from_bytes(&bytes(text)));
        let handles = handles.collect::<kvpack::Result<Vec<_>>>()?;
        // SAFETY: The handles are those of the ranks of this run, which all end after the last measurement.
        let peer = unsafe { slots.connect(&handles, DEADLINE) }.map_err(|error| error.to_string());
        let nccl = match <[u8; 128]>::try_from(bytes(&id)) {
            Ok(id) => Nccl::connect(&self.backend, &NcclId::from_bytes(id), (rank, ranks), DEADLINE)
                .map_err(|error| error.to_string()),
            Err(_) => Err(id),
        };
        let said = format!("{} {}", peer.is_ok(), nccl.is_ok());
        let all = self.meeting.meet(&said)?;
        for missing in [peer.as_ref().err(), nccl.as_ref().err()].into_iter().flatten() {
            note!("rank {rank} of {ranks}: {missing}");
        }
        ensure!(all[..ranks].iter().all(|other| *other == said), "the ranks do not have the same transports");
        Ok(Some(Links { peer, nccl }))
    }

    /// Exchanges alone, one after the other.
    async fn time_exchanges(&mut self, links: &mut Option<Links>, ranks: usize, found: &mut RanksFound) -> Result<()> {
        for rows in EXCHANGED_ROWS {
            for transport in ["peer", "nccl", "nccl all-gather"] {
                let time = match (links.as_mut(), transport) {
                    (Some(Links { peer: Ok(peer), .. }), "peer") => self.time_exchange(peer, rows).await?,
                    (Some(Links { nccl: Ok(nccl), .. }), "nccl") => self.time_exchange(nccl, rows).await?,
                    (Some(Links { nccl: Ok(nccl), .. }), "nccl all-gather") => self.time_gather(nccl, rows).await?,
                    _ => self.stand_by()?,
                };
                if let Some(time) = time {
                    let bytes = 4 * PeerSlots::words_of_states(&self.shape, rows);
                    let (us, spread) = (time.us(), time.spread);
                    found.exchanges.push(ExchangeRow { ranks, transport: transport.into(), bytes, us, spread });
                }
            }
        }
        Ok(())
    }

    async fn time_exchange(
        &self,
        transport: &mut impl Transport<Backend = Cuda>,
        rows: usize,
    ) -> Result<Option<Median>> {
        let states = self.states(rows)?;
        let mut gathered = transport.room_for_states(&self.shape, rows).await?;
        let elements = rows * self.shape.query_heads() * self.shape.head_dim();
        let mut output = Tensor::zeroed(self.backend.stream(), elements, ElementType::F32)?;
        self.time(transport, 1, |transport, _| {
            let exchange = StateExchange { shape: self.shape, rows, states: &states, gathered: &mut gathered };
            transport.merge_states(exchange, &mut output, None)
        })
    }

    /// One all-gather of the same bytes, to compare with what others measured.
    async fn time_gather(&self, transport: &mut impl Transport<Backend = Cuda>, rows: usize) -> Result<Option<Median>> {
        let words = PeerSlots::words_of_states(&self.shape, rows);
        let part = Tensor::zeroed(self.backend.stream(), words, ElementType::F32)?;
        let mut all = Tensor::zeroed(self.backend.stream(), words * transport.ranks(), ElementType::F32)?;
        self.time(transport, 1, |transport, _| transport.all_gather(&part, words, &mut all))
    }

    /// Random states.
    fn states(&self, rows: usize) -> Result<AttentionStates<Tensor>> {
        let heads = rows * self.shape.query_heads();
        let upload = |elements: usize, seed: u64| {
            let random: Vec<f32> = random_rows(elements, usize::MAX, seed).iter().map(|x| x.to_f32()).collect();
            Tensor::upload(self.backend.stream(), Elements::F32(&random))
        };
        let outputs = heads * self.shape.head_dim();
        let both = upload(outputs + heads, 10 + self.meeting.rank as u64)?;
        Ok(AttentionStates { outputs: both.slice(0, outputs)?, lse: both.slice(outputs, heads)? })
    }

    /// Meets as often as those who measure.
    fn stand_by(&self) -> Result<Option<Median>> {
        self.meeting.meet("")?;
        self.meeting.meet("")?;
        while self.meeting.of(0, "")? == AGAIN {}
        Ok(None)
    }

    /// The steps of one sequence on the first `ranks` ranks.
    async fn time_sequence(
        &mut self,
        contents: &Contents,
        (sequence, name): (Sequence, &'static str),
        (ranks, link): (usize, Option<&mut Option<Links>>),
        one: &mut Option<(Vec<f64>, f64)>,
        found: &mut RanksFound,
    ) -> Result<()> {
        let rank = self.meeting.rank;
        let filled = match self.is_one_of(ranks) {
            true => Some(Share::fill(&self.backend, contents, sequence, (rank, ranks), &self.queries).await),
            false => None,
        };
        let short = |error: &anyhow::Error| matches!(error.downcast_ref(), Some(Error::OutOfMemory { .. }));
        let said = match &filled {
            Some(Err(error)) if short(error) => "short",
            _ => "filled",
        };
        if self.meeting.meet(said)?.iter().any(|other| other == "short") {
            if rank == 0 {
                let what = format!("{} tokens, {name}, on {ranks}", sequence.tokens);
                note!("skipped {what}: they do not fit");
                found.skipped.push(Skipped { what, reason: "they do not fit".into() });
            }
            return Ok(());
        }
        let share = filled.transpose()?;
        let attend = match &share {
            Some(share) => self.time_attention(share)?,
            None => self.stand_by()?,
        };
        let Some((links, share)) = link.and_then(|link| link.as_mut()).zip(share.as_ref()) else {
            if let (1, Some(share), Some(attend)) = (ranks, &share, attend) {
                let row = self.row((sequence, name), share, (1, "none"), (attend, attend), Some(attend.seconds));
                *one = Some((self.outputs(&share.states.outputs).await?, attend.seconds));
                found.rows.push(RanksRow { nmse: Some(0.0), ..row });
            }
            if ranks > 1 {
                for _ in ["peer", "nccl"] {
                    self.meeting.meet("")?;
                    self.stand_by()?;
                }
            }
            return Ok(());
        };
        for transport in ["peer", "nccl"] {
            let checked = match (&mut links.peer, &mut links.nccl, transport) {
                (Ok(peer), _, "peer") => Some(self.check_and_time(peer, share, one).await?),
                (_, Ok(nccl), "nccl") => Some(self.check_and_time(nccl, share, one).await?),
                _ => {
                    self.meeting.meet("")?;
                    self.stand_by()?;
                    None
                }
            };
            if let (Some((nmse, Some(time))), Some(attend)) = (checked, attend) {
                let alone = one.as_ref().map(|(_, alone)| *alone);
                let row = self.row((sequence, name), share, (ranks, transport), (time, attend), alone);
                let exchanged = found.exchange_us(ranks, transport).unwrap_or(f64::NAN);
                found.rows.push(RanksRow { nmse, predicted_us: attend.us() + exchanged, ..row });
            }
        }
        Ok(())
    }

    fn row(
        &self,
        (sequence, name): (Sequence, &'static str),
        share: &Share,
        (ranks, transport): (usize, &str),
        (time, attend): (Median, Median),
        alone: Option<f64>,
    ) -> RanksRow {
        RanksRow {
            tokens: sequence.tokens,
            format: name.into(),
            ranks,
            transport: transport.into(),
            us: time.us(),
            spread: time.spread,
            attend_us: attend.us(),
            attend_spread: attend.spread,
            predicted_us: attend.us(),
            bytes: share.bytes(),
            copies: share.steps.len(),
            efficiency: alone.map(|alone| alone / (ranks as f64 * time.seconds)),
            nmse: None,
        }
    }

    /// Compares the merged output with that of one GPU where that holds the sequence, on all ranks bit by bit, then
    /// times.
    async fn check_and_time<T: Transport<Backend = Cuda>>(
        &self,
        transport: &mut T,
        share: &Share,
        one: &Option<(Vec<f64>, f64)>,
    ) -> Result<(Option<f64>, Option<Median>)> {
        let mut gathered = transport.room_for_states(&self.shape, 1).await?;
        let (shape, states, mut output) = (self.shape, &share.states, self.output.clone());
        let mut step = |transport: &mut T, copy: usize| {
            share.steps[copy].launch()?;
            let exchange = StateExchange { shape, rows: 1, states, gathered: &mut gathered };
            transport.merge_states(exchange, &mut output, None)
        };
        step(transport, 0)?;
        transport.wait()?;
        let merged = self.outputs(&self.output).await?;
        let bits: Vec<u8> = merged.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
        let said = format!("{:016x}", fnv(&bits));
        let all = self.meeting.meet(&said)?;
        ensure!(
            all[..transport.ranks()].iter().all(|other| *other == said),
            Wrong(format!("the ranks merged the same states to different bits: {all:?}"))
        );
        let mut error = None;
        if let Some((alone, _)) = one {
            let got: Vec<f32> = merged.iter().map(|&x| x as f32).collect();
            let nmse = nmse(&got, alone);
            ensure!(
                nmse <= MOST_NMSE,
                Wrong(format!("NMSE {nmse:.1e} against one GPU on {} ranks", transport.ranks()))
            );
            error = Some(nmse);
        }
        let time = self.time(transport, share.steps.len(), step)?;
        Ok((error, time))
    }

    async fn outputs(&self, tensor: &Tensor) -> Result<Vec<f64>> {
        Ok(self.backend.download(tensor).await?.into_iter().map(f64::from).collect())
    }

    /// The attention of the share, without an exchange.
    fn time_attention(&self, share: &Share) -> Result<Option<Median>> {
        self.time(&mut Alone, share.steps.len(), |_, step| share.steps[step].launch())
    }

    /// Times a graph of launches, as often on all ranks. Steps go round `copies`. Meets twice.
    fn time<T: Waits>(
        &self,
        transport: &mut T,
        copies: usize,
        mut launch: impl FnMut(&mut T, usize) -> kvpack::Result<()>,
    ) -> Result<Option<Median>> {
        let stream = self.backend.stream();
        let failed = |error| anyhow!("a graph of steps: {error}");
        // Before it is captured: NCCL connects then.
        launch(transport, 0)?;
        transport.wait_for_all(&self.backend)?;
        let steps = copies * STEPS.div_ceil(copies);
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
        let launched = (0..steps).try_for_each(|step| launch(transport, step % copies));
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(failed);
        launched?;
        let graph = graph?.ok_or_else(|| anyhow!("the driver captured no graph"))?;
        let replay = |times: usize| -> Result<Vec<f64>> {
            let event = || stream.context().new_event(Some(CU_EVENT_DEFAULT)).map_err(failed);
            let events = (0..=times).map(|_| event()).collect::<Result<Vec<_>>>()?;
            events[0].record(stream).map_err(failed)?;
            for event in &events[1..] {
                graph.launch().map_err(failed)?;
                event.record(stream).map_err(failed)?;
            }
            let between = |pair: &[CudaEvent]| Ok(f64::from(pair[0].elapsed_ms(&pair[1]).map_err(failed)?) / 1e3);
            events.windows(2).map(between).collect()
        };
        self.meeting.meet("captured")?;
        let first = replay(3)?.into_iter().fold(f64::INFINITY, f64::min);
        transport.wait_for_all(&self.backend)?;
        let first = self.meeting.of(0, &first.to_string())?.parse::<f64>().unwrap_or(SECONDS);
        let times = (SECONDS / first.max(1e-6)).clamp(REPLAYS.0, REPLAYS.1) as usize;
        let warm = (SECONDS / first.max(1e-6)).clamp(1.0, 1000.0) as usize;
        let mut best: Option<Median> = None;
        for attempt in 1.. {
            let samples = replay(warm + times)?.split_off(warm);
            transport.wait_for_all(&self.backend)?;
            let median = Median::of(samples.into_iter().map(|sample| sample / steps as f64).collect());
            best = Some(best.filter(|best| best.seconds < median.seconds).unwrap_or(median));
            let is_steady = median.spread.percent_of(median.us()) < STEADY;
            if self.meeting.of(0, if is_steady || attempt == ATTEMPTS { "good" } else { AGAIN })? != AGAIN {
                break;
            }
        }
        Ok(best.filter(|_| self.meeting.rank == 0))
    }
}

/// The line of rank 0 about a timing that is to be repeated.
const AGAIN: &str = "again";

/// What launches are waited for with.
trait Waits {
    fn wait_for_all(&mut self, backend: &Cuda) -> kvpack::Result<()>;
}

/// No transport.
struct Alone;

impl Waits for Alone {
    fn wait_for_all(&mut self, backend: &Cuda) -> kvpack::Result<()> {
        backend.stream().synchronize().map_err(|error| Error::Gpu { message: error.to_string() })
    }
}

impl<T: Transport<Backend = Cuda>> Waits for T {
    fn wait_for_all(&mut self, _: &Cuda) -> kvpack::Result<()> {
        self.wait()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    hex.as_bytes().chunks(2).filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// FNV-1a.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
