package edge

import (
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
)

// tape records what is done to a connection.
type tape struct {
	net.Conn
	writes    []int
	deadlines []time.Time
	fail      error
}

func (p *tape) Write(b []byte) (int, error) {
	if p.fail != nil {
		return len(b) / 2, p.fail
	}
	p.writes = append(p.writes, len(b))
	return len(b), nil
}

func (p *tape) SetWriteDeadline(t time.Time) error { p.deadlines = append(p.deadlines, t); return nil }
func (p *tape) SetDeadline(t time.Time) error      { return p.SetWriteDeadline(t) }

func taped(timeout time.Duration) (*Conn, *tape) {
	p := &tape{}
	l := &Listener{options: ListenOptions{WriteTimeout: timeout}, log: zap.NewNop()}
	return &Conn{Conn: p, CloseNotifier: NewCloseNotifier(l.log), ln: l}, p
}

func TestTheWriteDeadlineIsRenewedWhenLessThanThreeQuartersAreLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout = 40 * time.Second
		c, p := taped(timeout)
		start := time.Now()
		write := func(after time.Duration) {
			time.Sleep(time.Until(start.Add(after)))
			n, err := c.Write([]byte("data: 1\n\n"))
			require.NoError(t, err)
			require.Equal(t, 9, n)
		}
		write(0)
		write(5 * time.Second)
		write(10 * time.Second)
		require.Equal(t, []time.Time{start.Add(timeout)}, p.deadlines, "3/4 are left")
		write(10*time.Second + 1)
		require.Equal(t, start.Add(50*time.Second+1), p.deadlines[1])
		write(2 * time.Hour)
		require.Equal(t, start.Add(2*time.Hour+timeout), p.deadlines[2], "a stream may be quiet for longer than the timeout")
		require.Len(t, p.deadlines, 3)
	})
}

func TestEveryPieceOfALargeWriteHasItsOwnDeadline(t *testing.T) {
	c, p := taped(time.Minute)
	n, err := c.Write(make([]byte, 150<<10))
	require.NoError(t, err)
	require.Equal(t, 150<<10, n)
	require.Equal(t, []int{64 << 10, 64 << 10, 22 << 10}, p.writes)

	n, err = c.Write(nil)
	require.NoError(t, err)
	require.Zero(t, n)
}

func TestADeadlineOfTheCallersIsLeftAlone(t *testing.T) {
	for name, set := range map[string]func(c *Conn, t time.Time) error{
		"SetWriteDeadline": (*Conn).SetWriteDeadline, "SetDeadline": (*Conn).SetDeadline,
	} {
		t.Run(name, func(t *testing.T) {
			c, p := taped(time.Minute)
			_, err := c.Write([]byte("a"))
			require.NoError(t, err)
			mine := time.Now().Add(time.Second) // as crypto/tls does before its closing alert
			require.NoError(t, set(c, mine))
			_, err = c.Write([]byte("b"))
			require.NoError(t, err)
			require.Equal(t, mine, p.deadlines[len(p.deadlines)-1])

			require.NoError(t, set(c, time.Time{}))
			_, err = c.Write([]byte("c"))
			require.NoError(t, err)
			require.True(t, p.deadlines[len(p.deadlines)-1].After(mine), "ours again")
		})
	}
}

func TestNoWriteTimeoutSetsNoDeadline(t *testing.T) {
	c, p := taped(-1)
	_, err := c.Write([]byte("a"))
	require.NoError(t, err)
	require.Empty(t, p.deadlines)
}

func TestAWriteThatFailsMeansTheClientIsGone(t *testing.T) {
	c, p := taped(time.Minute)
	p.fail = os.ErrDeadlineExceeded
	n, err := c.Write([]byte("abcd"))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Equal(t, 2, n)
	select {
	case <-c.Gone():
	default:
		require.Fail(t, "not gone")
	}
}

// slowTape is a client that takes each write after a while.
type slowTape struct {
	tape
	takes time.Duration
}

func (p *slowTape) Write(b []byte) (int, error) {
	if by := p.deadlines[len(p.deadlines)-1]; time.Now().Add(p.takes).After(by) {
		time.Sleep(time.Until(by))
		return 0, os.ErrDeadlineExceeded
	}
	time.Sleep(p.takes)
	return len(b), nil
}

func TestAClientThatLagsIsCutInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &slowTape{takes: 20 * time.Second}
		l := &Listener{options: ListenOptions{WriteTimeout: 30 * time.Second, MaxLag: time.Minute}, log: zap.NewNop()}
		c := &Conn{Conn: p, CloseNotifier: NewCloseNotifier(l.log), ln: l}
		began := time.Now()
		for range 3 {
			_, err := c.Write([]byte("a"))
			require.NoError(t, err)
			time.Sleep(time.Minute) // the answer itself may be slow
		}
		_, err := c.Write([]byte("a"))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, 4*time.Minute, time.Since(began))
		require.EqualValues(t, 1, l.cutLagging.Load())

		c = &Conn{Conn: p, CloseNotifier: NewCloseNotifier(l.log), ln: l}
		_, err = c.Write([]byte("a"))
		require.NoError(t, err)
		p.takes = time.Hour
		for range 3 { // what comes behind the write that failed is of the same client
			_, err = c.Write([]byte("a"))
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		}
		require.EqualValues(t, 1, l.cutStalled.Load())
	})
}
