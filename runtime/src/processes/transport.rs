//! The connections of a process with the others of its run.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use crate::error::Error;
use crate::local::{Channel, Inbox, Transport};
use crate::patience::Patience;

use super::bootstrap::Peers;
use super::frame::{self, Head, Kind};

/// Period of heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Receives control messages of sessions, and losses of connections.
pub trait Handler: Send + Sync {
    /// A process has sent a control message.
    fn on_message(&self, process: usize, said: Vec<u8>);

    /// The connection with a process is lost.
    fn on_loss(&self, process: usize, why: &str);
}

/// The connections with the other processes.
pub struct TcpTransport {
    /// The ranks of each process.
    ranks: Vec<Range<usize>>,
    /// By process; none for this one.
    links: Vec<Option<Link>>,
    /// Whether this process has closed its connections.
    is_closed: AtomicBool,
}

struct Link {
    stream: Mutex<TcpStream>,
    machine: String,
    /// Why nothing can be sent any more.
    broken: Mutex<Option<String>>,
}

/// The ranks that each of some processes has: as many each, or one more.
pub fn ranks_of(ranks: usize, processes: usize) -> Vec<Range<usize>> {
    let start = |process: usize| ranks * process / processes;
    (0..processes).map(|process| start(process)..start(process + 1)).collect()
}

impl TcpTransport {
    /// Lets frames travel: what arrives goes to the ranks of this process, and to `handler`.
    /// Whoever sends or takes nothing for as long as `patience` is lost.
    ///
    /// # Errors
    /// The system starts no threads.
    pub fn start(
        peers: Peers,
        ranks: usize,
        inbox: &Inbox,
        handler: &Arc<dyn Handler>,
        patience: Duration,
    ) -> Result<Arc<TcpTransport>, Error> {
        let cannot = |source| Error::Threads { whom: "other processes".to_owned(), source };
        let ranks = ranks_of(ranks, peers.count());
        let (mut links, mut readers) = (Vec::new(), Vec::new());
        for (process, stream) in peers.connections.into_iter().enumerate() {
            let link = stream.map(|stream| {
                stream.set_write_timeout(Some(patience))?;
                let slice = Patience::new(patience).slice();
                stream.set_read_timeout(Some(slice.max(Duration::from_millis(1))))?;
                readers.push((process, stream.try_clone()?));
                let machine = stream.peer_addr()?.ip().to_canonical().to_string();
                Ok(Link { stream: Mutex::new(stream), machine, broken: Mutex::default() })
            });
            links.push(link.transpose().map_err(cannot)?);
        }
        let transport = Arc::new(TcpTransport { ranks, links, is_closed: AtomicBool::new(false) });
        inbox.connect(Arc::clone(&transport) as Arc<dyn Transport>);
        for (process, stream) in readers {
            let reader = Reader {
                process,
                stream: TimeoutReader { stream, limit: patience },
                transport: Arc::downgrade(&transport),
                ranks: transport.ranks[process].clone(),
                inbox: inbox.clone(),
                handler: Arc::clone(handler),
            };
            let named = thread::Builder::new().name(format!("process {process}"));
            named.spawn(move || reader.run()).map_err(cannot)?;
        }
        let (weak, inbox) = (Arc::downgrade(&transport), inbox.clone());
        let named = thread::Builder::new().name("progress".to_owned());
        named.spawn(move || heartbeat(&weak, &inbox)).map_err(cannot)?;
        Ok(transport)
    }

    /// The process that has a rank.
    pub fn process_of(&self, rank: usize) -> usize {
        self.ranks.partition_point(|ranks| ranks.end <= rank)
    }

    /// The numbers of the other processes.
    pub fn others(&self) -> impl Iterator<Item = usize> + '_ {
        let is_other = |(process, link): (usize, &Option<Link>)| link.as_ref().map(|_| process);
        self.links.iter().enumerate().filter_map(is_other)
    }

    /// The machine of a process.
    pub fn machine_of(&self, process: usize) -> &str {
        self.links[process].as_ref().map_or("this machine", |link| &link.machine)
    }

    /// Says something to the host of another process's session.
    pub fn send_control(&self, process: usize, said: &[u8]) {
        self.write(process, Head::of(Kind::Control, said.len()), [said, &[]]);
    }

    /// Closes the connections: peers take their end for no loss.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.write_all(Head::of(Kind::Close, 0), &[]);
        for link in self.links.iter().flatten() {
            let _ = lock(&link.stream).shutdown(Shutdown::Write);
        }
    }

    fn write(&self, process: usize, head: Head, parts: [&[u8]; 2]) {
        let Some(link) = &self.links[process] else { return };
        let mut stream = lock(&link.stream);
        let written = frame::write(&mut *stream, head, parts).and_then(|()| stream.flush());
        if let Err(why) = written {
            // The thread that reads from it reports the loss.
            lock(&link.broken).get_or_insert_with(|| why.to_string());
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn write_all(&self, head: Head, body: &[u8]) {
        self.others().for_each(|process| self.write(process, head, [body, &[]]));
    }

    /// The reason why a connection was lost.
    fn loss_reason(&self, process: usize, error: &io::Error) -> String {
        let broken = self.links[process].as_ref().and_then(|link| lock(&link.broken).clone());
        let ended = error.kind() == io::ErrorKind::UnexpectedEof;
        let own = || if ended { "it has ended".to_owned() } else { error.to_string() };
        let why = broken.unwrap_or_else(own);
        let machine = self.machine_of(process);
        match process {
            0 => format!("the first process, on {machine}, is gone: {why}"),
            _ => format!("process {process}, on {machine}, is gone: {why}"),
        }
    }
}

impl Transport for TcpTransport {
    fn send(&self, channel: Channel, from: usize, to: usize, parts: [&[u8]; 2]) {
        let kind = match channel {
            Channel::Message => Kind::Message,
            Channel::Collective => Kind::Collective,
        };
        let length = parts.iter().map(|part| part.len()).sum();
        let head = Head { from: from as u32, to: to as u32, ..Head::of(kind, length) };
        self.write(self.process_of(to), head, parts);
    }

    fn broadcast_failure(&self, rank: usize, reason: &str) {
        let head = Head { from: rank as u32, ..Head::of(Kind::Failure, reason.len()) };
        self.write_all(head, reason.as_bytes());
    }

    fn broadcast_end(&self, rank: usize) {
        self.write_all(Head { from: rank as u32, ..Head::of(Kind::RankEnded, 0) }, &[]);
    }

    fn machine(&self, rank: usize) -> String {
        self.machine_of(self.process_of(rank)).to_owned()
    }
}

/// Sends heartbeats: how many instructions the ranks of this process have finished since the last.
fn heartbeat(transport: &Weak<TcpTransport>, inbox: &Inbox) {
    let mut told = 0;
    loop {
        thread::sleep(HEARTBEAT);
        let Some(transport) = transport.upgrade() else { return };
        if transport.is_closed.load(Ordering::SeqCst) {
            return;
        }
        let now = inbox.progress();
        transport.write_all(Head { length: now - told, ..Head::of(Kind::Heartbeat, 0) }, &[]);
        told = now;
    }
}

/// A connection that is lost when nothing arrives for some time: heartbeats do.
struct TimeoutReader {
    stream: TcpStream,
    limit: Duration,
}

impl Read for TimeoutReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut patience = Patience::new(self.limit);
        loop {
            let read = self.stream.read(bytes);
            let is_silent = read.as_ref().is_err_and(|why| {
                matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
            });
            if !is_silent {
                return read;
            }
            patience.count(0);
            if patience.is_over() {
                let seconds = self.limit.as_secs_f64();
                return Err(io::Error::other(format!("it has said nothing for {seconds:.1} s")));
            }
        }
    }
}

/// Reads the frames of a process and delivers them.
struct Reader {
    process: usize,
    stream: TimeoutReader,
    transport: Weak<TcpTransport>,
    /// The ranks of the process.
    ranks: Range<usize>,
    inbox: Inbox,
    handler: Arc<dyn Handler>,
}

impl Reader {
    fn run(mut self) {
        let ended = self.read_all();
        let Some(transport) = self.transport.upgrade() else { return };
        let Err(error) = ended else { return };
        if transport.is_closed.load(Ordering::SeqCst) {
            return;
        }
        let why = transport.loss_reason(self.process, &error);
        self.inbox.fail(self.ranks.start, &why);
        self.handler.on_loss(self.process, &why);
    }

    fn read_all(&mut self) -> io::Result<()> {
        loop {
            let head = Head::read(&mut self.stream)?;
            let from = head.from as usize;
            let is_of_rank = !matches!(head.kind, Kind::Heartbeat | Kind::Control | Kind::Close);
            if is_of_rank && !self.ranks.contains(&from) && head.kind != Kind::Failure {
                return Err(io::Error::other("it speaks for the ranks of others"));
            }
            match head.kind {
                Kind::Message => self.message(Channel::Message, head)?,
                Kind::Collective => self.message(Channel::Collective, head)?,
                Kind::Failure => {
                    let why = self.body(head)?;
                    self.inbox.note_failure(from, &String::from_utf8_lossy(&why));
                }
                Kind::RankEnded => self.inbox.note_end(from),
                Kind::Heartbeat => self.inbox.note_progress(head.length),
                Kind::Control => {
                    let said = self.body(head)?;
                    self.handler.on_message(self.process, said);
                }
                Kind::Close => return Ok(()),
            }
        }
    }

    fn message(&mut self, channel: Channel, head: Head) -> io::Result<()> {
        let (from, to) = (head.from as usize, head.to as usize);
        if !self.inbox.takes(from, to) {
            return Err(io::Error::other("it sends to ranks that are elsewhere"));
        }
        let mut message = self.inbox.buffer(channel, from, to);
        frame::read(&mut self.stream, head.length, &mut message)?;
        self.inbox.deliver(channel, from, to, message);
        Ok(())
    }

    fn body(&mut self, head: Head) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        frame::read(&mut self.stream, head.length, &mut body)?;
        Ok(body)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peers {
    /// Sends what a session of the other processes begins with, before frames travel.
    ///
    /// # Errors
    /// A process is gone.
    pub(crate) fn send_setup(&mut self, setup: &[u8]) -> Result<(), Error> {
        let head = Head::of(Kind::Control, setup.len());
        for (process, stream) in self.connections.iter_mut().enumerate() {
            let Some(stream) = stream else { continue };
            let sent = frame::write(stream, head, [setup, &[]]);
            sent.map_err(|why| gone(process, &why))?;
        }
        Ok(())
    }

    /// Receives what a session begins with, from the first process.
    ///
    /// # Errors
    /// It is gone, or sends something else.
    pub(crate) fn receive_setup(&mut self) -> Result<Vec<u8>, Error> {
        let Some(Some(stream)) = self.connections.first_mut() else {
            unreachable!("the first process begins");
        };
        let mut setup = Vec::new();
        let head = Head::read(stream).and_then(|head| {
            frame::read(stream, head.length, &mut setup)?;
            Ok(head)
        });
        let head = head.map_err(|why| gone(0, &why))?;
        if head.kind != Kind::Control {
            return Err(gone(0, &io::ErrorKind::InvalidData.into()));
        }
        Ok(setup)
    }
}

fn gone(process: usize, why: &io::Error) -> Error {
    let whom =
        if process == 0 { "the first process".to_owned() } else { format!("process {process}") };
    let reason = if why.kind() == io::ErrorKind::UnexpectedEof {
        format!("{whom} has ended")
    } else {
        format!("{whom} is gone: {why}")
    };
    super::refusal(reason, "its own message says why")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::super::bootstrap::tests::connect;
    use super::*;
    use crate::communicator::{Combiner, Communicator, Group};
    use crate::local::Local;

    struct Recorder(Mutex<Sender<(usize, Result<Vec<u8>, String>)>>);

    impl Handler for Recorder {
        fn on_message(&self, process: usize, said: Vec<u8>) {
            let _ = lock(&self.0).send((process, Ok(said)));
        }

        fn on_loss(&self, process: usize, why: &str) {
            let _ = lock(&self.0).send((process, Err(why.to_owned())));
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    /// Three processes with two, two and three of seven ranks sum, send and talk; one leaves
    /// without a word.
    #[test]
    fn ranks_of_several_processes_exchange() {
        let ranks = 7;
        let parts = connect(3).into_iter().map(|peers| {
            let here = ranks_of(ranks, 3)[peers.launch.process].clone();
            let (ends, inbox) = Local::part(ranks, here, LONG);
            let (sender, recorded) = channel();
            let handler: Arc<dyn Handler> = Arc::new(Recorder(Mutex::new(sender)));
            let transport = TcpTransport::start(peers, ranks, &inbox, &handler, LONG).unwrap();
            (ends, transport, recorded)
        });
        let mut parts: Vec<_> = parts.collect();
        let group = Group::new(0, (0..ranks).rev().collect());
        let length = 1_500_000;
        let run = |end: &mut Local| {
            let mut buffer: Vec<u8> =
                (0..length).flat_map(|at| ((at + end.rank()) as i32).to_le_bytes()).collect();
            end.all_reduce(&group, ir::DType::I32.into(), Combiner::Sum, &mut buffer).unwrap();
            let sums = (0..length).map(|at| (7 * at + 21) as i32);
            assert!(buffer.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).eq(sums));
            let (to, from) = ((end.rank() + 3) % ranks, (end.rank() + 4) % ranks);
            end.send(to, &[end.rank() as u8; 100]).unwrap();
            let mut got = [0; 100];
            end.receive(from, &mut got).unwrap();
            assert_eq!(got, [from as u8; 100]);
        };
        thread::scope(|scope| {
            for end in parts.iter_mut().flat_map(|(ends, ..)| ends) {
                scope.spawn(|| run(end));
            }
        });
        parts[0].1.send_control(2, b"order");
        assert_eq!(parts[2].2.recv().unwrap(), (0, Ok(b"order".to_vec())));
        let (ends, gone, _) = parts.remove(1);
        for link in gone.links.iter().flatten() {
            lock(&link.stream).shutdown(Shutdown::Both).unwrap();
        }
        let (process, why) = parts[0].2.recv().unwrap();
        assert!(process == 1 && why.unwrap_err().contains("has ended"));
        let failed = parts[1].0[0].barrier(&group).unwrap_err();
        // The one that is left may first receive what that one reported of the other.
        assert!(failed.to_string().contains("is gone: it has ended"), "{failed}");
        drop(ends);
    }

    /// A process that is there and sends nothing is lost, too.
    #[test]
    fn silence_is_a_loss() {
        let mut both = connect(2);
        let (_silent, peers) = (both.pop(), both.remove(0));
        let (_ends, inbox) = Local::part(2, 0..1, LONG);
        let (sender, recorded) = channel();
        let handler: Arc<dyn Handler> = Arc::new(Recorder(Mutex::new(sender)));
        let patience = Duration::from_millis(300);
        let _wires = TcpTransport::start(peers, 2, &inbox, &handler, patience).unwrap();
        let (process, why) = recorded.recv().unwrap();
        assert!(process == 1 && why.unwrap_err().contains("said nothing for 0.3 s"));
    }
}
