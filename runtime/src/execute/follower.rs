//! The ranks of a process that follows: made from the programs that it is sent, they run what the
//! leading host orders, until it ends the session.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ir::Target;
use ir::ids::Ids;
use kernels::bounds::verify_programs;

use crate::cuda::gpus::Gpus;
use crate::error::{Error, Failure};
use crate::local::Local;
use crate::processes::{Handler, Peers, TcpTransport, ranks_of};

use super::finite::Found;
use super::leader::{Command, PATIENCE, Reply, Setup, encode, unexpected};
use super::{Classes, Devices, Options, Session, Watch, cpus, lock};

/// Which ranks a process has, and how many threads each of them, where that is said.
pub type Share = (Range<usize>, Option<usize>);

/// Opens what the ranks of a process compute on, by their programs and the target of these.
pub type Prepare<'a> = dyn Fn(&Classes, Option<Target>, Share) -> Result<Prepared, Failure> + 'a;

/// What a process that follows has for its ranks.
pub struct Prepared {
    /// Threads of a rank.
    pub threads_per_rank: usize,
    /// Its GPUs, where programs are for these.
    pub gpus: Option<Gpus>,
}

/// Has ranks of a session that another process leads, until that one ends it: with which exit code.
///
/// # Errors
/// The ranks cannot be made; the leading process is lost.
pub fn follow(mut peers: Peers, prepare: &Prepare<'_>) -> Result<u8, Failure> {
    let setup: Setup = postcard::from_bytes(&peers.receive_setup()?).map_err(|_| unexpected(0))?;
    let Setup { programs, kernels, mesh, target, threads_per_rank, deadline, tracing, disk } =
        setup;
    let wrong = verify_programs(&programs, &kernels, mesh);
    if !wrong.is_empty() {
        return Err(wrong.into());
    }
    let classes = Arc::new(Classes { programs, kernels, mesh, ids: Ids::default() });
    let size = mesh.ranks();
    let here = ranks_of(size, peers.count()).swap_remove(peers.launch().process);
    let (locals, inbox) = Local::part(size, here.clone(), deadline);
    let (sender, orders) = channel();
    let handler: Arc<dyn Handler> = Arc::new(LeaderHandler(Mutex::new(sender)));
    let transport = TcpTransport::start(peers, size, &inbox, &handler, PATIENCE)?;
    let started = prepare(&classes, target, (here.clone(), threads_per_rank)).and_then(|own| {
        let threads_per_rank = own.threads_per_rank;
        let options = Options { threads_per_rank, deadline, tracing, disk };
        let cpu = cpus(threads_per_rank);
        let devices = own.gpus.as_ref().map_or(Devices::Made(&cpu), Devices::Gpus);
        let mut session = Session::without_ranks(classes, here, &options);
        let watches = session.start_ranks(&options, devices, locals)?;
        Ok(Follower { session, gpus: own.gpus, watches, deadline })
    });
    let ready = started.as_ref().map(|_| Gpus::have_nccl()).map_err(ToString::to_string);
    transport.send_control(0, &encode(&Reply::Ready(ready)));
    let code = started.and_then(|own| Ok(own.serve(&orders, &transport)?))?;
    transport.close();
    Ok(code)
}

/// Handles the messages of the leader.
struct LeaderHandler(Mutex<Sender<Result<Command, String>>>);

impl Handler for LeaderHandler {
    fn on_message(&self, process: usize, said: Vec<u8>) {
        if process == 0 {
            let order = postcard::from_bytes(&said).map_err(|why| why.to_string());
            // The session may be gone.
            let _ = lock(&self.0).send(order);
        }
    }

    fn on_loss(&self, process: usize, why: &str) {
        if process == 0 {
            let _ = lock(&self.0).send(Err(why.to_owned()));
        }
    }
}

/// The ranks of a process that follows.
struct Follower {
    session: Session,
    gpus: Option<Gpus>,
    /// What connects these, until they are connected.
    watches: Vec<Watch>,
    deadline: Duration,
}

impl Follower {
    /// Carries out orders until the last.
    fn serve(
        mut self,
        orders: &Receiver<Result<Command, String>>,
        transport: &TcpTransport,
    ) -> Result<u8, Error> {
        let lost =
            |reason| Error::Processes { reason, help: "its own message says why".to_owned() };
        let gone = |_| lost("the first process is gone".to_owned());
        loop {
            let order = orders.recv().map_err(gone)?.map_err(lost)?;
            if let Command::End(code) = order {
                return Ok(code);
            }
            if let Some(answer) = self.carry_out(order)? {
                transport.send_control(0, &encode(&answer));
            }
        }
    }

    /// Carries out one order; what is answered, where anything is.
    fn carry_out(&mut self, order: Command) -> Result<Option<Reply>, Error> {
        let session = &mut self.session;
        Ok(Some(match order {
            Command::Run(phase, inputs) => {
                let start = Instant::now();
                let ran = session.control.obey(phase, inputs).into_iter();
                let found = |rank| {
                    let found: Option<Found> = lock(session.seat(rank)).found;
                    found.map(|found| (found, found.when.saturating_duration_since(start)))
                };
                Reply::Ran(ran.map(|(rank, it)| (rank, it, found(rank))).collect())
            }
            Command::Read(rank, buffer, bytes) => {
                let bytes =
                    session.lend(rank, |lent| lent.bytes(buffer, bytes).map(Cow::into_owned));
                Reply::Bytes(bytes?)
            }
            Command::Examine(rank, ranges) => {
                Reply::Examined(session.lend(rank, |lent| lent.first_not_finite(&ranges))?)
            }
            Command::Spans(rank) => Reply::Spans(lock(session.seat(rank)).spans.clone()),
            Command::Connect(ids) => {
                let watches = std::mem::take(&mut self.watches);
                let gpus = self.gpus.as_ref();
                let connect = |gpus| session.connect(gpus, watches, self.deadline, ids);
                let connected = gpus.map_or(Ok(()), connect);
                Reply::Ready(connected.map(|()| true).map_err(|why| why.to_string()))
            }
            Command::Write(rank, buffer, first, bytes) => {
                session.write_from(rank, buffer, first, &bytes);
                return Ok(None);
            }
            Command::Copy(ends, tokens) => {
                session.copy_cached(ends, tokens);
                return Ok(None);
            }
            Command::End(_) => return Ok(None),
        }))
    }
}
