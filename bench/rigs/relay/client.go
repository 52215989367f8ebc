//go:build linux

package main

import (
	"encoding/gob"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel/bench/lab/reftext"
)

// Job is what one process of clients does.
type Job struct {
	Targets []string // host:port, in turn
	Prefill []string // host:port, in turn: clients have each prompt prefilled there first, as a proxy would; none: they do not
	Streams int
	Rate    float64 // streams that are opened a second
	Prompt  int     // tokens
	Tokens  int     // of an answer; another request follows each, until the end is told

	// Lasts is set where each stream is one answer: all end so long after the first
	// began, having got a token every Step.
	Lasts, Step time.Duration

	// Every is the time between two requests of a stream; 0: one follows when the other's answer ends.
	Every time.Duration
}

// Order is what is told to clients that run.
type Order int

const (
	mark Order = iota // count from here, or up to here; the answer is a Told
	stop              // send no more requests
)

// Told is what clients say: at first when all streams have their first token, then
// for each mark, in the end with Result.
type Told struct {
	Events, Requests int64 // so far; requests are those that ended whole
	Result           *Result
}

// Result is what clients saw.
type Result struct {
	TTFT, Gaps []uint32 // µs; between the marks, but TTFT of all where each stream is one answer
	Whole      int
	Failed     map[string]int
}

// client runs streams on one thread: it costs less CPU a chunk than a goroutine for
// each stream, and the machine is the proxy's.
type client struct {
	job     Job
	started time.Time
	poll    int
	streams []stream
	opened  int    // streams that were opened
	heard   int    // streams that have had a first token, or failed before it
	later   []turn // in the order of their times
	live    int
	marked  bool // between the marks
	stopped bool
	now     time.Time
	told    Told
	result  Result
	buf     [64 << 10]byte
	say     *gob.Encoder
}

// conn is a connection, and the request on it.
type conn struct {
	fd    int
	event int    // the number that its events bear
	out   []byte // of the request, still to be written
	full  bool   // it is to say when there is room to write
}

// stream is one connection, and the request on it. Prompt is that to a prefill engine, if clients
// ask one.
type stream struct {
	conn
	prompt     conn
	handOff    []byte // what came of the prefill engine's answer
	answer     answer
	path, id   string // of the request
	body       string // what both legs ask
	tokens     int    // of its answer
	requests   int
	want       int  // events
	begun      bool // this request has had a token
	heard      bool // the stream has
	waits      bool // it has no request, and asks at its next turn
	sent, last time.Time
}

// turn is when a stream asks again.
type turn struct {
	at     time.Time
	stream int
}

// nap is how long clients let bytes gather before they read. Where they are woken for
// every chunk, the proxy that writes it pays for that, as it would not for clients on
// other machines.
const nap = 500 * time.Microsecond

// sources is how many addresses clients have: a pair of addresses has 28,000 ports.
const sources = 8

const reopenAfter = 200 * time.Millisecond // after a failure

// runClients is the command of a process of clients: it reads a job and orders from
// stdin.
func runClients() error {
	in := gob.NewDecoder(os.Stdin)
	c := &client{say: gob.NewEncoder(answers())}
	if err := in.Decode(&c.job); err != nil {
		return err
	}
	wake, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return err
	}
	orders := make(chan Order, 4)
	go func() {
		for {
			var o Order
			if in.Decode(&o) != nil {
				os.Exit(1) // nobody wants the answer any more
			}
			orders <- o
			_, _ = unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		}
	}()
	return c.run(wake, orders)
}

func (c *client) run(wake int, orders <-chan Order) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if c.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	defer func() { _ = unix.Close(c.poll) }()
	if err := unix.EpollCtl(c.poll, unix.EPOLL_CTL_ADD, wake, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: -1}); err != nil {
		return err
	}
	c.streams = make([]stream, c.job.Streams)
	for i := range c.streams {
		c.streams[i].conn, c.streams[i].prompt = conn{fd: -1, event: i}, conn{fd: -1, event: len(c.streams) + i}
	}
	c.result.Failed = map[string]int{}
	c.started = time.Now()
	events := make([]unix.EpollEvent, 512)
	for first := true; ; {
		c.now = time.Now()
		wait := c.open()
		if first && c.heard == c.job.Streams {
			first = false
			if err := c.say.Encode(c.told); err != nil {
				return err
			}
		}
		if c.opened == c.job.Streams && c.live == 0 && (c.stopped || c.job.Lasts > 0) {
			c.told.Result = &c.result
			return c.say.Encode(c.told)
		}
		n, err := unix.EpollWait(c.poll, events, int((wait+time.Millisecond-1)/time.Millisecond))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if n > 0 {
			_ = unix.Nanosleep(&unix.Timespec{Nsec: int64(nap)}, nil) // an error: it was shorter
			n, _ = unix.EpollWait(c.poll, events, 0)
		}
		for _, e := range events[:max(0, n)] {
			if e.Fd >= 0 {
				c.ready(int(e.Fd), e.Events)
				continue
			}
			var count [8]byte
			_, _ = unix.Read(wake, count[:])
			for len(orders) > 0 {
				if err := c.obey(<-orders); err != nil {
					return err
				}
			}
		}
	}
}

func (c *client) obey(o Order) error {
	if o == stop {
		c.stopped = true
		c.opened = c.job.Streams
		for _, t := range c.later {
			if c.streams[t.stream].fd >= 0 {
				c.close(t.stream)
			}
		}
		c.later = nil
		return nil
	}
	c.marked = !c.marked
	return c.say.Encode(c.told)
}

// open opens the streams that are due, and says how long none is.
func (c *client) open() (wait time.Duration) {
	wait = time.Second
	for c.opened < c.job.Streams {
		due := c.started.Add(time.Duration(float64(c.opened) / c.job.Rate * float64(time.Second)))
		if wait = due.Sub(c.now); wait > 0 {
			break
		}
		c.connect(c.opened)
		c.opened++
	}
	for len(c.later) > 0 && !c.stopped {
		t := c.later[0]
		if left := t.at.Sub(c.now); left > 0 {
			return min(max(0, wait), left)
		}
		c.later = c.later[1:]
		if c.streams[t.stream].fd < 0 {
			c.connect(t.stream)
		} else {
			c.streams[t.stream].sent = time.Now()
			c.ask(t.stream)
		}
	}
	return max(0, wait)
}

// asksAt has a stream ask again at a time.
func (c *client) asksAt(i int, at time.Time) {
	n, _ := slices.BinarySearchFunc(c.later, at, func(t turn, at time.Time) int { return t.at.Compare(at) })
	c.later = slices.Insert(c.later, n, turn{at, i})
}

// connect opens a stream.
func (c *client) connect(i int) {
	s := &c.streams[i]
	s.sent = time.Now()
	c.live++
	c.ask(i)
}

// dial begins a connection of a stream, which says when it can be written to.
func (c *client) dial(k *conn, target string) error {
	to, err := netip.ParseAddrPort(target)
	if err != nil {
		return err
	}
	if k.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	_ = unix.SetsockoptInt(k.fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(k.fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1) // a port is taken for the pair, not for the address
	if err := unix.Bind(k.fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, byte(2 + k.event%c.job.Streams%sources)}}); err != nil {
		return err
	}
	err = unix.Connect(k.fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	k.full = true
	return unix.EpollCtl(c.poll, unix.EPOLL_CTL_ADD, k.fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT, Fd: int32(k.event)})
}

// send sends a request on a connection, which is opened if there is none.
func (c *client) send(k *conn, target string, request []byte) error {
	k.out = request
	if k.fd >= 0 {
		return c.write(k)
	}
	if err := c.dial(k, target); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	return nil
}

// write writes what it can of a request, and asks to be told of room for the rest.
func (c *client) write(k *conn) error {
	if len(k.out) > 0 {
		n, err := unix.Write(k.fd, k.out)
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("write: %w", err)
		}
		k.out = k.out[max(0, n):]
	}
	if len(k.out) == 0 {
		k.out = nil
	}
	if full := len(k.out) > 0; full != k.full {
		k.full = full
		events := uint32(unix.EPOLLIN)
		if full {
			events |= unix.EPOLLOUT
		}
		_ = unix.EpollCtl(c.poll, unix.EPOLL_CTL_MOD, k.fd, &unix.EpollEvent{Events: events, Fd: int32(k.event)})
	}
	return nil
}

func (k *conn) close() {
	if k.fd >= 0 {
		_ = unix.Close(k.fd)
	}
	k.fd, k.out = -1, nil
}

// ask makes the next request of a stream.
func (c *client) ask(i int) {
	s := &c.streams[i]
	s.waits = false
	s.tokens = c.job.Tokens
	switch {
	case c.job.Lasts > 0:
		s.tokens = 1 + int((c.job.Lasts-s.sent.Sub(c.started))/c.job.Step)
	case s.requests == 0: // streams that were opened together do not end together
		s.tokens = 1 + i*7919%c.job.Tokens
	}
	head := s.answer.head[:0]
	s.answer = answer{head: head}
	s.requests++
	s.begun = false
	s.want = s.tokens
	s.id = fmt.Sprintf("relay-%d-%d", i, s.requests)
	prompt := string(reftext.AppendPrompt(nil, uint64(i)<<32|uint64(s.requests), c.job.Prompt))
	s.path, s.body = "/v1/completions", fmt.Sprintf(`{"model":"ref","prompt":"%s"`, prompt)
	if i%2 == 0 {
		s.path, s.body = "/v1/chat/completions", fmt.Sprintf(`{"model":"ref","messages":[{"role":"user","content":"%s"}]`, prompt)
		s.want++ // a chat begins with an event for the role
	}
	if len(c.job.Prefill) > 0 {
		c.prefill(i)
		return
	}
	c.decode(i, "")
}

// decode asks for the answer, with more members than both legs have.
func (c *client) decode(i int, more string) {
	s := &c.streams[i]
	target := c.job.Targets[i%len(c.job.Targets)]
	if err := c.send(&s.conn, target, post(s.path, target, s.id, s.body+fmt.Sprintf(`,"max_tokens":%d,"ignore_eos":true,"stream":true%s}`, s.tokens, more))); err != nil {
		c.lost(i, err)
	}
}

// post is a request.
func post(path, host, id, body string) []byte {
	return fmt.Appendf(nil,
		"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nX-Request-Id: %s\r\nContent-Length: %d\r\n\r\n%s", path, host, id,
		len(body), body)
}

// ready goes on with the connection whose events bear a number.
func (c *client) ready(event int, events uint32) {
	i := event % len(c.streams)
	s := &c.streams[i]
	k, read := &s.conn, c.read
	if event != i {
		k, read = &s.prompt, c.readHandOff
	}
	if k.fd < 0 {
		return
	}
	if events&unix.EPOLLOUT != 0 {
		if err := c.write(k); err != nil {
			c.lost(i, err)
			return
		}
	}
	if events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		read(i)
	}
}

func (c *client) read(i int) {
	s := &c.streams[i]
	n, err := unix.Read(s.fd, c.buf[:])
	switch {
	case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
		return
	case err != nil:
		c.lost(i, fmt.Errorf("read: %w", err))
		return
	case n == 0 && s.waits: // between two requests
		c.close(i)
		return
	case n == 0:
		c.lost(i, s.answer.whole(s.want))
		return
	}
	events, err := s.answer.feed(c.buf[:n])
	if events > 0 {
		c.came(s, events)
	}
	switch {
	case err != nil:
		c.lost(i, err)
	case s.answer.at == atEnd:
		c.ended(i)
	}
}

// came books events that came at once.
func (c *client) came(s *stream, events int) {
	now := time.Now()
	c.told.Events += int64(events)
	if !s.begun {
		s.begun = true
		c.hear(s)
		if c.marked || c.job.Lasts > 0 {
			c.result.TTFT = append(c.result.TTFT, uint32(now.Sub(s.sent).Microseconds()))
		}
		events--
	} else if c.marked {
		c.result.Gaps = append(c.result.Gaps, uint32(now.Sub(s.last).Microseconds()))
		events--
	}
	if c.marked {
		for range events {
			c.result.Gaps = append(c.result.Gaps, 0)
		}
	}
	s.last = now
}

// hear counts a stream once.
func (c *client) hear(s *stream) {
	if !s.heard {
		s.heard = true
		c.heard++
	}
}

// ended looks at an answer that is complete, and goes on with the next request.
func (c *client) ended(i int) {
	s := &c.streams[i]
	if err := s.answer.whole(s.want); err != nil {
		c.lost(i, err)
		return
	}
	c.told.Requests++
	c.result.Whole++
	if c.job.Lasts > 0 || c.stopped {
		c.close(i)
		return
	}
	next := s.sent.Add(c.job.Every)
	if s.answer.closes {
		c.close(i)
	}
	switch {
	case c.job.Every > 0 && time.Until(next) > 0:
		s.waits = true
		c.asksAt(i, next)
	case s.answer.closes:
		c.connect(i)
	default:
		s.sent = time.Now()
		c.ask(i)
	}
}

func (c *client) close(i int) {
	s := &c.streams[i]
	s.conn.close()
	s.prompt.close()
	c.live--
}

// lost books a request that failed, and why.
func (c *client) lost(i int, why error) {
	s := &c.streams[i]
	c.hear(s)
	text, _, _ := strings.Cut(why.Error(), "\n")
	c.result.Failed[text]++
	c.close(i)
	if c.job.Lasts == 0 && !c.stopped && !s.waits {
		s.waits = true
		c.asksAt(i, time.Now().Add(reopenAfter))
	}
}
