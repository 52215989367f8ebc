package scenes

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// router carries IP packets between TUN devices, one for each region and the last for
// the machine. Between two regions each comes so much later than it was sent, and
// some are lost.
type router struct {
	devices          [sides + 1]*os.File
	links            [3]wire
	readers, writers sync.WaitGroup
}

// wire is a link between two regions, both ways.
type wire struct {
	delay time.Duration
	loss  atomic.Uint64 // Float64bits of the share
	queue chan packet
}

type packet struct {
	due   time.Time
	to    *os.File
	bytes []byte
}

func newRouter(name func(i int) string, delays [3]time.Duration) (*router, error) {
	r := &router{}
	for i := range r.links {
		r.links[i].delay, r.links[i].queue = delays[i], make(chan packet, 20_000)
		r.writers.Go(r.links[i].write)
	}
	for i := range r.devices {
		var err error
		if r.devices[i], err = openTUN(name(i)); err != nil {
			return r, err
		}
	}
	for from := range r.devices {
		r.readers.Go(func() { r.read(from) })
	}
	return r, nil
}

// openTUN makes a device that is gone once the file is closed, in whichever
// namespace it is by then.
func openTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("TUN device %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// lose is the share of packets lost from now on; 1 cuts the wire.
func (w *wire) lose(share float64) { w.loss.Store(math.Float64bits(share)) }
func (w *wire) loses() float64     { return math.Float64frombits(w.loss.Load()) }

// read passes on what one device sends, by the last byte of an IPv4 packet's destination.
func (r *router) read(from int) {
	for buf := make([]byte, 1<<16); ; {
		n, err := r.devices[from].Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		to := int(buf[19]%8) - 1
		switch {
		case err != nil: // the device is not up yet, or no more
			time.Sleep(time.Millisecond)
		case n < 20 || buf[0]>>4 != 4 || to < 0 || to > sides || to == from: // what devices say by themselves
		case to == sides || from == sides:
			_, _ = r.devices[to].Write(buf[:n]) // what a device does not take is lost
		case rand.Float64() >= r.links[link(from, to)].loses():
			w := &r.links[link(from, to)]
			select {
			case w.queue <- packet{time.Now().Add(w.delay), r.devices[to], append([]byte(nil), buf[:n]...)}:
			default: // a router's queue is full, too, at times
			}
		}
	}
}

// write delivers what comes, but for what was under way when the wire was cut.
func (w *wire) write() {
	for p := range w.queue {
		time.Sleep(time.Until(p.due))
		if w.loses() < 1 {
			_, _ = p.to.Write(p.bytes)
		}
	}
}

func (r *router) close() {
	for _, f := range r.devices {
		_ = f.Close() // nil, if it could not be made, has an error
	}
	r.readers.Wait()
	for i := range r.links {
		close(r.links[i].queue)
	}
	r.writers.Wait()
}
