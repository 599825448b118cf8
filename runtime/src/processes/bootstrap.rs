//! How processes that were started together find each other.
//!
//! All connect to the first process and send who they are. Once all have, it sends each the
//! addresses of the others, and every two of these connect. A listener sends a challenge first, and
//! whoever connects proves with it that it knows the secret of the run, where there is one.

use std::collections::BTreeSet;
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
/// How long a connection and what is sent first on it may take.
const SHORT: Duration = Duration::from_secs(30);
/// How often a process looks whether another one has connected.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of a message of the handshake, at most.
const MESSAGE_BYTES_MAX: u32 = 1 << 20;
/// What a handshake begins with.
const MAGIC: [u8; 8] = *b"gantline";

/// The first message of a process that connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    magic: [u8; 8],
    version: String,
    job: String,
    process: usize,
    count: usize,
    /// Where it listens.
    port: u16,
    /// What the listener proves with that it knows the secret, too.
    challenge: [u8; 32],
    /// That it knows the secret.
    proof: [u8; 32],
}

/// What the first process answers.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// All have joined; where each listens, the first one aside, and that it knows the secret.
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
    /// Connects this process with all others: the first one waits for them, they for the first.
    /// `notify` gets lines for the user.
    ///
    /// # Errors
    /// Not all come in time; one is of another version or another run; no connection between two.
    pub fn connect(self, notify: &dyn Fn(&str)) -> Result<Peers, Error> {
        if self.process == 0 { self.open()?.connect(notify) } else { self.follow(notify) }
    }

    /// Opens the port of the first process, to which the others connect.
    ///
    /// # Errors
    /// Another program has it; the system starts no thread.
    pub fn open(self) -> Result<Bootstrap, Error> {
        let port = self.leader.1;
        let taken = |why: io::Error| {
            let help = "set MASTER_PORT, for all processes, to a port that is free";
            refusal(format!("the first process can't listen on port {port}: {why}"), help)
        };
        let listener =
            listen(port).and_then(|listener| Listener::open(&self, listener)).map_err(taken)?;
        Ok(Bootstrap { launch: self, listener: Some(listener) })
    }

    fn hello(&self, port: u16, challenge: [u8; 32]) -> Hello {
        let mut hello = Hello {
            magic: MAGIC,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            job: self.job.clone(),
            process: self.process,
            count: self.count,
            port,
            challenge: nonce(),
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

    /// Receives the first message of a process, and whether it knows the secret; none from another
    /// program.
    fn receive(&self, stream: &mut TcpStream) -> Option<(Hello, bool)> {
        let challenge = nonce();
        send(stream, &challenge).ok()?;
        let hello: Hello =
            receive_short(stream).ok().filter(|hello: &Hello| hello.magic == MAGIC)?;
        let knows = hello.proof == self.proof_of(&hello, challenge);
        Some((hello, knows))
    }

    /// Sends the first message of this process to a listener.
    fn introduce(&self, stream: &mut TcpStream, port: u16) -> io::Result<Hello> {
        let hello = self.hello(port, receive_short(stream)?);
        send(stream, &hello)?;
        Ok(hello)
    }

    /// Why a process is not one that is waited for.
    fn refusal_reason(&self, hello: &Hello, knows: bool, is_free: bool) -> Option<String> {
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

    fn missing(&self, joined: &[Option<Joined>]) -> Error {
        let missing = joined.iter().enumerate().skip(1).filter(|(_, one)| one.is_none());
        let numbers: Vec<String> = missing.map(|(number, _)| number.to_string()).collect();
        let (count, minutes) = (self.count, PATIENCE.as_secs() / 60);
        let missing = numbers.join(", ");
        let reason = format!("of {count} processes, {missing} did not connect in {minutes} min");
        let help = "the launcher says why they did not start; MASTER_ADDR is to lead here";
        refusal(reason, help)
    }

    fn follow(self, notify: &dyn Fn(&str)) -> Result<Peers, Error> {
        let own = |why: io::Error| {
            refusal(format!("this process can't listen: {why}"), "look at the limits of the system")
        };
        let listener = listen(0).map_err(own)?;
        let port = listener.local_addr().map_err(own)?.port();
        let (host, at) = &self.leader;
        let (own_number, count) = (self.process, self.count);
        notify(&format!("ranks    of process {own_number} of {count}, led by that on {host}:{at}"));
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
        let addresses = match receive_within::<Answer>(&mut leader, PATIENCE).map_err(silent)? {
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
        let (since, listener) = (Instant::now(), Listener::open(&self, listener).map_err(own)?);
        while let Some(missing) =
            (self.process + 1..self.count).find(|&at| connections[at].is_none())
        {
            let Some(Newcomer { stream, hello, knows, .. }) = listener.next(since, SHORT) else {
                return Err(lost_at(missing, &io::ErrorKind::TimedOut.into()));
            };
            let is_free = hello.process > self.process
                && connections.get(hello.process).is_some_and(Option::is_none);
            if self.refusal_reason(&hello, knows, is_free).is_none() {
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

/// The first process while the others connect. When it is dropped, their connections end: those
/// that have not come yet are waited for, for some seconds.
pub struct Bootstrap {
    launch: Launch,
    /// None once all are connected, or could not be.
    listener: Option<Listener>,
}

/// How long a first process that has failed waits for the others, so that they end with it rather
/// than look for it. Chosen: launchers start all processes within seconds.
const FAREWELL: Duration = Duration::from_secs(10);

impl Drop for Bootstrap {
    fn drop(&mut self) {
        let Some(listener) = self.listener.take() else { return };
        let since = Instant::now();
        let mut missing: BTreeSet<usize> = (1..self.launch.count).collect();
        while !missing.is_empty() {
            let Some(newcomer) = listener.next(since, FAREWELL) else { break };
            missing.remove(&newcomer.hello.process);
        }
    }
}

impl Bootstrap {
    /// Which of the processes this is.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// Waits for all others. `notify` gets a line for each process that is refused.
    ///
    /// # Errors
    /// Not all come in time, or a connection is lost.
    pub fn connect(mut self, notify: &dyn Fn(&str)) -> Result<Peers, Error> {
        let launch = self.launch.clone();
        let Some(listener) = self.listener.take() else { unreachable!("it connects once") };
        let mut joined: Vec<Option<Joined>> = Vec::new();
        joined.resize_with(launch.count, || None);
        let since = Instant::now();
        while joined.iter().skip(1).any(Option::is_none) {
            let Some(Newcomer { mut stream, from, hello, knows }) = listener.next(since, PATIENCE)
            else {
                return Err(launch.missing(&joined));
            };
            let place = joined.get(hello.process);
            let is_free = hello.process > 0
                && place.is_some_and(|one| {
                    one.as_ref().is_none_or(|one| is_closed_by_peer(&one.stream))
                });
            if let Some(why) = launch.refusal_reason(&hello, knows, is_free) {
                notify(&format!("note: process {}, from {from}, is refused: {why}", hello.process));
                let _ = send(&mut stream, &Answer::Refused(why));
                continue;
            }
            let listens = SocketAddr::new(from, hello.port);
            joined[hello.process] = Some(Joined { stream, listens, challenge: hello.challenge });
        }
        let mut addresses: Vec<SocketAddr> = joined.iter().flatten().map(|it| it.listens).collect();
        if addresses.iter().any(|at| !at.ip().is_loopback()) {
            // Others know this machine by the name that they know the first process by.
            let own = addresses_of(&launch.leader).find(|at| !at.ip().is_loopback());
            for at in addresses.iter_mut().filter(|at| at.ip().is_loopback()) {
                at.set_ip(own.map_or(at.ip(), |own| own.ip()));
            }
        }
        let mut connections = Vec::new();
        for one in joined {
            let connection = one.map(|Joined { mut stream, challenge, .. }| {
                let proof = launch.secret.prove(&challenge);
                send(&mut stream, &Answer::All(addresses.clone(), proof))?;
                settle(stream)
            });
            let lost = |why: io::Error| lost_at(connections.len(), &why);
            connections.push(connection.transpose().map_err(lost)?);
        }
        Ok(Peers { launch, connections })
    }
}

/// Whether the peer has closed a connection on which nothing is to come now.
fn is_closed_by_peer(stream: &TcpStream) -> bool {
    let is_waited_for = stream.set_nonblocking(true).is_ok();
    let peeked = stream.peek(&mut [0]);
    is_waited_for && stream.set_nonblocking(false).is_ok() && matches!(peeked, Ok(0))
}

/// A process that has joined.
struct Joined {
    stream: TcpStream,
    /// The address where it listens for others.
    listens: SocketAddr,
    /// See [`Hello::challenge`].
    challenge: [u8; 32],
}

/// Random bytes, used once.
fn nonce() -> [u8; 32] {
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

/// Accepts connections in a thread, and receives the first message of each in one of its own, so
/// that one that is silent keeps nobody waiting.
struct Listener {
    newcomers: Receiver<Newcomer>,
    is_closed: Arc<AtomicBool>,
}

/// A process that has sent its first message.
struct Newcomer {
    stream: TcpStream,
    from: IpAddr,
    hello: Hello,
    /// Whether it knows the secret.
    knows: bool,
}

impl Listener {
    fn open(launch: &Launch, listener: TcpListener) -> io::Result<Listener> {
        let (sender, newcomers) = channel();
        let is_closed = Arc::new(AtomicBool::new(false));
        let (launch, closed) = (launch.clone(), Arc::clone(&is_closed));
        let accept_all = move || {
            while !closed.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((stream, from)) => receive(&launch, stream, from, &sender),
                    Err(_) => sleep(PAUSE),
                }
            }
        };
        thread::Builder::new().name("bootstrap".to_owned()).spawn(accept_all)?;
        Ok(Listener { newcomers, is_closed })
    }

    /// The next process; none after some time.
    fn next(&self, since: Instant, patience: Duration) -> Option<Newcomer> {
        self.newcomers.recv_timeout(patience.saturating_sub(since.elapsed())).ok()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }
}

/// Receives the first message of a connection in a thread of its own.
fn receive(launch: &Launch, mut stream: TcpStream, from: SocketAddr, sender: &Sender<Newcomer>) {
    let (launch, sender) = (launch.clone(), sender.clone());
    let receive = move || {
        stream.set_nonblocking(false).ok()?;
        let (hello, knows) = launch.receive(&mut stream)?;
        let from = from.ip().to_canonical();
        sender.send(Newcomer { stream, from, hello, knows }).ok()
    };
    // Without a thread for it, the connection ends, and its process with it.
    let _ = thread::Builder::new().name("bootstrap".to_owned()).spawn(receive);
}

/// Makes a connection ready for frames.
fn settle(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_read_timeout(None)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn send(stream: &mut TcpStream, said: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(SHORT))?;
    let bytes = postcard::to_stdvec(said).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_le_bytes(), bytes.as_slice()].concat())
}

fn receive_short<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    receive_within(stream, SHORT)
}

fn receive_within<T: DeserializeOwned>(
    stream: &mut TcpStream,
    patience: Duration,
) -> io::Result<T> {
    stream.set_read_timeout(Some(patience))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MESSAGE_BYTES_MAX {
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
    pub(in crate::processes) fn connect(count: usize) -> Vec<Peers> {
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
            std::thread::spawn(move || launch.connect(&|_| ()).unwrap())
        });
        let all: Vec<_> = all.collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    }

    #[test]
    fn every_two_processes_are_connected() {
        for count in 2..6 {
            let mut all = connect(count);
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
        let leader = std::thread::spawn(move || leader.connect(&|_| ()));
        let mut stranger = launch(1, "a", "s").reach().unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        for (job, secret, wanted) in [("b", "s", "another run"), ("a", "t", "GANTLINE_SECRET")] {
            let refused = launch(1, job, secret).connect(&|_| ()).unwrap_err();
            assert!(refused.to_string().contains(wanted), "{refused}");
        }
        // Who listened to another one's proof can't use it again.
        let [mut first, mut second] = [0; 2].map(|_| launch(1, "a", "s").reach().unwrap());
        let hello = launch(1, "a", "s").hello(1, receive_short(&mut first).unwrap());
        receive_short::<[u8; 32]>(&mut second).unwrap();
        drop(first);
        send(&mut second, &hello).unwrap();
        let answer = receive_short::<Answer>(&mut second).unwrap();
        assert!(matches!(answer, Answer::Refused(why) if why.contains("GANTLINE_SECRET")));
        launch(1, "a", "s").connect(&|_| ()).unwrap();
        leader.join().unwrap().unwrap();
    }
}
