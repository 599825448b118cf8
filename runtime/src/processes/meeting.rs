//! How processes that were started together find each other.
//!
//! All come to the first one's port and say who they are. When all have come it tells each where
//! the others listen, and every two of these connect. Whoever listens sends a challenge first, and
//! whoever comes proves with it that it knows the secret of the run, where there is one.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Error;

use super::launch::Launch;
use super::refusal;

/// How long a process waits for the others. Chosen: schedulers start the processes of a job within
/// minutes, and the first one may plan for some.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long one that has come may take to say who it is, and to be connected with.
const SHORT: Duration = Duration::from_secs(30);
/// How often it is looked whether one has come.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of what is said in a meeting, at most.
const SAID_BYTES_MAX: u32 = 1 << 20;
/// What a process begins with.
const MAGIC: [u8; 8] = *b"gantline";

/// What a process says when it comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    magic: [u8; 8],
    version: String,
    job: String,
    process: usize,
    count: usize,
    /// Where it listens.
    port: u16,
    /// What the one that listens proves itself with.
    challenge: [u8; 32],
    /// That it knows the secret.
    proof: [u8; 32],
}

/// What the first process answers.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// All have come; where each listens, the first one aside, and that it knows the secret.
    All(Vec<SocketAddr>, [u8; 32]),
    /// It is none of them.
    Refused(String),
}

/// The other processes of a run, connected.
#[derive(Debug)]
pub struct Peers {
    /// Which of them this one is.
    pub(super) launch: Launch,
    /// By process; none for this one.
    pub(super) connections: Vec<Option<TcpStream>>,
}

impl Peers {
    /// The number of processes, this one included.
    pub fn count(&self) -> usize {
        self.launch.count
    }

    /// This process.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }
}

impl Launch {
    /// Meets the other processes. The first one waits for all, the others for the first. `tell` is
    /// told what users may want to know meanwhile.
    ///
    /// # Errors
    /// Not all come in time; one is of another version or another run; no connection between two.
    pub fn meet(self, tell: &dyn Fn(&str)) -> Result<Peers, Error> {
        if self.process == 0 { self.open()?.meet(tell) } else { self.follow(tell) }
    }

    /// Opens the port of the first process, to which the others come.
    ///
    /// # Errors
    /// Another program has it; the system starts no thread.
    pub fn open(self) -> Result<Reception, Error> {
        let port = self.leader.1;
        let taken = |why: io::Error| {
            let help = "set MASTER_PORT, for all processes, to a port that is free";
            refusal(format!("the first process can't listen on port {port}: {why}"), help)
        };
        let door = listen(port).and_then(|listener| Door::open(&self, listener)).map_err(taken)?;
        Ok(Reception { launch: self, door })
    }

    fn hello(&self, port: u16, challenge: [u8; 32]) -> Hello {
        let mut hello = Hello {
            magic: MAGIC,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            job: self.job.clone(),
            process: self.process,
            count: self.count,
            port,
            challenge: fresh(),
            proof: [0; 32],
        };
        hello.proof = self.proof_of(&hello, challenge);
        hello
    }

    /// What proves that who says this, after a challenge, knows the secret.
    fn proof_of(&self, hello: &Hello, challenge: [u8; 32]) -> [u8; 32] {
        let said = (Hello { proof: [0; 32], ..hello.clone() }, challenge);
        self.secret.prove(&postcard::to_stdvec(&said).unwrap_or_default())
    }

    /// What a process says that has come; none where it is no process of ours.
    fn receive(&self, stream: &mut TcpStream) -> Option<(Hello, bool)> {
        let challenge = fresh();
        say(stream, &challenge).ok()?;
        let hello: Hello = take(stream).ok().filter(|hello: &Hello| hello.magic == MAGIC)?;
        let knows = hello.proof == self.proof_of(&hello, challenge);
        Some((hello, knows))
    }

    /// Says who this is, to one that listens.
    fn introduce(&self, stream: &mut TcpStream, port: u16) -> io::Result<Hello> {
        let hello = self.hello(port, take(stream)?);
        say(stream, &hello)?;
        Ok(hello)
    }

    /// Why whoever says this is not the process that is waited for.
    fn doubt(&self, hello: &Hello, knows: bool, is_free: bool) -> Option<String> {
        let version = env!("CARGO_PKG_VERSION");
        if hello.version != version {
            return Some(format!("it is of version {version}, and not {}", hello.version));
        }
        if !knows {
            return Some("its GANTLINE_SECRET is another".to_owned());
        }
        if hello.count != self.count {
            return Some(format!(
                "it is one of {} processes, and not of {}",
                hello.count, self.count
            ));
        }
        if hello.job != self.job {
            return Some("it is of another run".to_owned());
        }
        (!is_free).then(|| format!("another process has the number {}", hello.process))
    }

    fn missing(&self, come: &[Option<Come>]) -> Error {
        let missing = come.iter().enumerate().skip(1).filter(|(_, one)| one.is_none());
        let numbers: Vec<String> = missing.map(|(number, _)| number.to_string()).collect();
        let (count, minutes) = (self.count, PATIENCE.as_secs() / 60);
        let missing = numbers.join(", ");
        let reason = format!("of {count} processes, {missing} did not come in {minutes} min");
        let help = "the launcher says why they did not start; MASTER_ADDR is to lead here";
        refusal(reason, help)
    }

    fn follow(self, tell: &dyn Fn(&str)) -> Result<Peers, Error> {
        let own = |why: io::Error| {
            refusal(format!("this process can't listen: {why}"), "look at the limits of the system")
        };
        let listener = listen(0).map_err(own)?;
        let port = listener.local_addr().map_err(own)?.port();
        let (host, at) = &self.leader;
        let (own_number, count) = (self.process, self.count);
        tell(&format!("ranks    of process {own_number} of {count}, led by that on {host}:{at}"));
        let mut leader = self.reach()?;
        let silent = |why: io::Error| {
            let help = "its message says why, or MASTER_ADDR and MASTER_PORT name another program";
            let (kind, silence) = (why.kind(), "does not answer");
            let ended = [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset];
            let why = if ended.contains(&kind) {
                "has ended".to_owned()
            } else if kind == io::ErrorKind::WouldBlock {
                silence.to_owned()
            } else {
                format!("{silence}: {why}")
            };
            refusal(format!("the first process, on {host}:{at}, {why}"), help)
        };
        let hello = self.introduce(&mut leader, port).map_err(silent)?;
        let own_proof = self.secret.prove(&hello.challenge);
        let addresses = match take_in::<Answer>(&mut leader, PATIENCE).map_err(silent)? {
            Answer::All(addresses, proof)
                if proof == own_proof && addresses.len() + 1 == self.count =>
            {
                addresses
            }
            Answer::All(..) => return Err(silent(io::ErrorKind::InvalidData.into())),
            Answer::Refused(why) => {
                let reason = format!("the first process, on {host}:{at}, refuses this one: {why}");
                let help = "start all processes with one command, and with the same variables";
                return Err(refusal(reason, help));
            }
        };
        let mut connections: Vec<Option<TcpStream>> = Vec::new();
        connections.resize_with(self.count, || None);
        connections[0] = Some(settle(leader).map_err(silent)?);
        for (process, address) in addresses.iter().enumerate().map(|(at, it)| (at + 1, it)) {
            if process >= self.process {
                break;
            }
            let reached = TcpStream::connect_timeout(address, SHORT).and_then(|mut stream| {
                self.introduce(&mut stream, port)?;
                settle(stream)
            });
            connections[process] = Some(reached.map_err(|why| lost_at(process, &why))?);
        }
        let (since, door) = (Instant::now(), Door::open(&self, listener).map_err(own)?);
        while let Some(missing) =
            (self.process + 1..self.count).find(|&at| connections[at].is_none())
        {
            let Some(Guest { stream, hello, knows, .. }) = door.next(since, SHORT) else {
                return Err(lost_at(missing, &io::ErrorKind::TimedOut.into()));
            };
            let is_free = hello.process > self.process
                && connections.get(hello.process).is_some_and(Option::is_none);
            if self.doubt(&hello, knows, is_free).is_none() {
                let settled = settle(stream).map_err(|why| lost_at(hello.process, &why))?;
                connections[hello.process] = Some(settled);
            }
        }
        Ok(Peers { launch: self, connections })
    }

    /// A connection to the first process, as soon as it listens.
    fn reach(&self) -> Result<TcpStream, Error> {
        let since = Instant::now();
        loop {
            let (host, port) = &self.leader;
            let found = match (host.as_str(), *port).to_socket_addrs() {
                Ok(mut at) => {
                    let connect = |at| TcpStream::connect_timeout(&at, SHORT).ok();
                    at.find_map(connect).ok_or_else(|| "nothing listens there".to_owned())
                }
                Err(why) => Err(why.to_string()),
            };
            let why = match found {
                Ok(stream) => return Ok(stream),
                Err(why) => why,
            };
            if since.elapsed() > PATIENCE {
                let minutes = PATIENCE.as_secs() / 60;
                let reason =
                    format!("the first process is not on {host}:{port} after {minutes} min: {why}");
                let help = "MASTER_ADDR and MASTER_PORT say where it is";
                return Err(refusal(reason, help));
            }
            sleep(PAUSE);
        }
    }
}

/// The first process, while the others come. Where it goes, they are told by the end of their
/// connections.
pub struct Reception {
    launch: Launch,
    door: Door,
}

impl Reception {
    /// Which of the processes this is.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// Waits for all others. `tell` is told whom it refuses.
    ///
    /// # Errors
    /// Not all come in time, or a connection is lost.
    pub fn meet(self, tell: &dyn Fn(&str)) -> Result<Peers, Error> {
        let Reception { launch, door } = self;
        let mut come: Vec<Option<Come>> = Vec::new();
        come.resize_with(launch.count, || None);
        let since = Instant::now();
        while come.iter().skip(1).any(Option::is_none) {
            let Some(Guest { mut stream, from, hello, knows }) = door.next(since, PATIENCE) else {
                return Err(launch.missing(&come));
            };
            let place = come.get(hello.process);
            let is_free = hello.process > 0
                && place.is_some_and(|one| one.as_ref().is_none_or(|one| is_gone(&one.stream)));
            if let Some(why) = launch.doubt(&hello, knows, is_free) {
                tell(&format!("note: process {}, from {from}, is refused: {why}", hello.process));
                let _ = say(&mut stream, &Answer::Refused(why));
                continue;
            }
            let listens = SocketAddr::new(from, hello.port);
            come[hello.process] = Some(Come { stream, listens, challenge: hello.challenge });
        }
        let mut addresses: Vec<SocketAddr> = come.iter().flatten().map(|it| it.listens).collect();
        if addresses.iter().any(|at| !at.ip().is_loopback()) {
            // Others know this machine by the name that they know the first process by.
            let own = addresses_of(&launch.leader).find(|at| !at.ip().is_loopback());
            for at in addresses.iter_mut().filter(|at| at.ip().is_loopback()) {
                at.set_ip(own.map_or(at.ip(), |own| own.ip()));
            }
        }
        let mut connections = Vec::new();
        for one in come {
            let connection = one.map(|Come { mut stream, challenge, .. }| {
                let proof = launch.secret.prove(&challenge);
                say(&mut stream, &Answer::All(addresses.clone(), proof))?;
                settle(stream)
            });
            let lost = |why: io::Error| lost_at(connections.len(), &why);
            connections.push(connection.transpose().map_err(lost)?);
        }
        Ok(Peers { launch, connections })
    }
}

/// Whether the other end of a connection, which is to say nothing now, is closed.
fn is_gone(stream: &TcpStream) -> bool {
    let is_waited_for = stream.set_nonblocking(true).is_ok();
    let peeked = stream.peek(&mut [0]);
    is_waited_for && stream.set_nonblocking(false).is_ok() && matches!(peeked, Ok(0))
}

/// A process that has come.
struct Come {
    stream: TcpStream,
    /// Where it does so.
    listens: SocketAddr,
    /// What the first one proves itself with.
    challenge: [u8; 32],
}

/// Bytes that nobody has seen before.
fn fresh() -> [u8; 32] {
    let mut bytes = [0; 32];
    for part in bytes.as_chunks_mut::<8>().0 {
        *part = RandomState::new().hash_one(std::process::id()).to_le_bytes();
    }
    bytes
}

fn addresses_of((host, port): &(String, u16)) -> impl Iterator<Item = SocketAddr> + use<> {
    (host.as_str(), *port).to_socket_addrs().into_iter().flatten()
}

/// Listens on all addresses of this machine.
fn listen(port: u16) -> io::Result<TcpListener> {
    let all = [IpAddr::from([0_u16; 8]), IpAddr::from([0_u8; 4])];
    let listener = TcpListener::bind(all.map(|ip| SocketAddr::new(ip, port)).as_slice())?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Where processes come. Each has a thread to say who it is to, so that nobody waits for one that
/// says nothing.
struct Door {
    guests: Receiver<Guest>,
    is_closed: Arc<AtomicBool>,
}

/// Somebody who has said that it is a process of ours.
struct Guest {
    stream: TcpStream,
    from: IpAddr,
    hello: Hello,
    /// Whether it knows the secret.
    knows: bool,
}

impl Door {
    fn open(launch: &Launch, listener: TcpListener) -> io::Result<Door> {
        let (sender, guests) = channel();
        let is_closed = Arc::new(AtomicBool::new(false));
        let (launch, closed) = (launch.clone(), Arc::clone(&is_closed));
        let let_in = move || {
            while !closed.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((stream, from)) => receive(&launch, stream, from, &sender),
                    Err(_) => sleep(PAUSE),
                }
            }
        };
        thread::Builder::new().name("meeting".to_owned()).spawn(let_in)?;
        Ok(Door { guests, is_closed })
    }

    /// The next one that comes; none after some time.
    fn next(&self, since: Instant, patience: Duration) -> Option<Guest> {
        self.guests.recv_timeout(patience.saturating_sub(since.elapsed())).ok()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }
}

/// Hears who somebody is, in a thread of its own.
fn receive(launch: &Launch, mut stream: TcpStream, from: SocketAddr, sender: &Sender<Guest>) {
    let (launch, sender) = (launch.clone(), sender.clone());
    let receive = move || {
        stream.set_nonblocking(false).ok()?;
        let (hello, knows) = launch.receive(&mut stream)?;
        let from = from.ip().to_canonical();
        sender.send(Guest { stream, from, hello, knows }).ok()
    };
    // Where there is no thread for it, it comes again.
    let _ = thread::Builder::new().name("meeting".to_owned()).spawn(receive);
}

/// Makes a connection ready for frames.
fn settle(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_read_timeout(None)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn say(stream: &mut TcpStream, said: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(SHORT))?;
    let bytes = postcard::to_stdvec(said).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_le_bytes(), bytes.as_slice()].concat())
}

fn take<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    take_in(stream, SHORT)
}

fn take_in<T: DeserializeOwned>(stream: &mut TcpStream, patience: Duration) -> io::Result<T> {
    stream.set_read_timeout(Some(patience))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > SAID_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}

fn lost_at(process: usize, why: &io::Error) -> Error {
    let reason = format!("no connection with process {process}: {why}");
    refusal(reason, "all machines of a run are to reach each other, on any port")
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::AtomicU16;

    use super::super::launch::Secret;
    use super::*;

    /// A port that the system gives nobody by itself.
    fn port() -> u16 {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let first = 20_000 + (std::process::id() % 1000) as u16 * 10;
        let next = || first + NEXT.fetch_add(1, Ordering::Relaxed);
        let mut free = std::iter::repeat_with(next).filter(|at| listen(*at).is_ok());
        free.next().unwrap()
    }

    /// Processes that are threads, connected over this machine's own network.
    pub(in crate::processes) fn meet(count: usize) -> Vec<Peers> {
        let free = port();
        let launch = |process| Launch {
            launcher: "test",
            process,
            count,
            local: (process, count),
            leader: ("127.0.0.1".to_owned(), free),
            job: "test".to_owned(),
            secret: Secret::of("s"),
        };
        let all = (0..count).map(|process| {
            let launch = launch(process);
            std::thread::spawn(move || launch.meet(&|_| ()).unwrap())
        });
        let all: Vec<_> = all.collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    }

    #[test]
    fn every_two_processes_are_connected() {
        for count in 2..6 {
            let mut all = meet(count);
            for (a, of_process) in all.iter().enumerate() {
                let mut others = of_process.connections.iter().enumerate();
                assert!(others.all(|(b, one)| one.is_some() == (a != b)));
            }
            for (a, b) in (0..count).flat_map(|a| (0..count).map(move |b| (a, b))) {
                if let Some(stream) = &mut all[a].connections[b] {
                    stream.write_all(&[a as u8]).unwrap();
                }
                if let Some(stream) = &mut all[b].connections[a] {
                    let mut said = [0];
                    stream.read_exact(&mut said).unwrap();
                    assert_eq!(said, [a as u8], "both ends are of the same two processes");
                }
            }
        }
    }

    #[test]
    fn others_are_refused_and_not_waited_for() {
        let free = port();
        let launch = |process, job: &str, secret| Launch {
            launcher: "test",
            process,
            count: 2,
            local: (process, 2),
            leader: ("127.0.0.1".to_owned(), free),
            job: job.to_owned(),
            secret: Secret::of(secret),
        };
        let leader = launch(0, "a", "s");
        let leader = std::thread::spawn(move || leader.meet(&|_| ()));
        let mut stranger = launch(1, "a", "s").reach().unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        for (job, secret, wanted) in [("b", "s", "another run"), ("a", "t", "GANTLINE_SECRET")] {
            let refused = launch(1, job, secret).meet(&|_| ()).unwrap_err();
            assert!(refused.to_string().contains(wanted), "{refused}");
        }
        // Who listened to another one's proof can't use it again.
        let [mut first, mut second] = [0; 2].map(|_| launch(1, "a", "s").reach().unwrap());
        let hello = launch(1, "a", "s").hello(1, take(&mut first).unwrap());
        take::<[u8; 32]>(&mut second).unwrap();
        drop(first);
        say(&mut second, &hello).unwrap();
        let answer = take::<Answer>(&mut second).unwrap();
        assert!(matches!(answer, Answer::Refused(why) if why.contains("GANTLINE_SECRET")));
        launch(1, "a", "s").meet(&|_| ()).unwrap();
        leader.join().unwrap().unwrap();
    }
}
