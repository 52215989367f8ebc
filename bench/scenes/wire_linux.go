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

// wire carries IP packets between two TUN devices, each so much later than it
// came, and loses some.
type wire struct {
	names [2]string
	ends  [2]*os.File
	delay time.Duration
	loss  atomic.Uint64 // Float64bits of the share
	wg    sync.WaitGroup
}

func newWire(prefix string, delay time.Duration) (w *wire, err error) {
	w = &wire{delay: delay}
	for i := range w.ends {
		w.names[i] = fmt.Sprint(prefix, i)
		if w.ends[i], err = openTUN(w.names[i]); err != nil {
			return nil, errors.Join(err, w.shut())
		}
	}
	for i := range w.ends {
		way := make(chan packet, 20_000)
		w.wg.Go(func() { w.read(w.ends[i], way) })
		w.wg.Go(func() { w.write(w.ends[1-i], way) })
	}
	return w, nil
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

type packet struct {
	due   time.Time
	bytes []byte
}

// lose is the share of packets lost from now on; 1 cuts the wire.
func (w *wire) lose(share float64) { w.loss.Store(math.Float64bits(share)) }

func (w *wire) read(from *os.File, way chan<- packet) {
	defer close(way)
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil { // the device is not up yet, or no more
			time.Sleep(time.Millisecond)
			continue
		}
		if rand.Float64() < math.Float64frombits(w.loss.Load()) {
			continue
		}
		select {
		case way <- packet{time.Now().Add(w.delay), append([]byte(nil), buf[:n]...)}:
		default: // a router's queue is full, too, at times
		}
	}
}

func (w *wire) write(to *os.File, way <-chan packet) {
	for p := range way {
		time.Sleep(time.Until(p.due))
		if math.Float64frombits(w.loss.Load()) < 1 {
			_, _ = to.Write(p.bytes) // what a device does not take is lost
		}
	}
}

func (w *wire) shut() (err error) {
	for _, f := range w.ends {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

func (w *wire) close() {
	_ = w.shut()
	w.wg.Wait()
}
