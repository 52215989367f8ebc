package kube

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"evenkeel/engine/discover"
)

// wire is an API server on a real port.
type wire struct {
	*testing.T
	*httptest.Server
	deaf    atomic.Bool  // new connections are accepted and closed
	version atomic.Int64 // of what it has
	open    atomic.Int64 // watches
	ended   atomic.Pointer[context.CancelFunc]
	until   atomic.Pointer[context.Context] // watches last as long

	mu    sync.Mutex
	lists []string // resource versions that were asked for, of pods
	told  chan error
}

// closing is a listener that closes what it accepts while the server is deaf.
type closing struct {
	net.Listener
	deaf *atomic.Bool
}

func (l closing) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || !l.deaf.Load() {
			return c, err
		}
		_ = c.Close()
	}
}

func newWire(t *testing.T) *wire {
	s := &wire{T: t, told: make(chan error, 1000)}
	s.version.Store(100)
	s.watchesLast()
	s.Server = httptest.NewUnstartedServer(s)
	s.Listener = closing{s.Listener, &s.deaf}
	s.Start()
	t.Cleanup(func() {
		s.endWatches()
		s.Close()
	})
	return s
}

func (s *wire) watchesLast() (before *context.CancelFunc) {
	ctx, end := context.WithCancel(context.Background())
	s.until.Store(&ctx)
	return s.ended.Swap(&end)
}

// endWatches ends the watches that are open. Later ones last.
func (s *wire) endWatches() { (*s.watchesLast())() }

// ServeHTTP answers as kube-apiserver 1.37 does: it does not stream lists here, and a version that
// it does not have yet is refused with the advice to ask again.
func (s *wire) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	answer := func(code int, o any) {
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(o)
	}
	refuse := func(code int, reason metav1.StatusReason, details *metav1.StatusDetails) {
		answer(code, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: int32(code),
			Reason: reason, Details: details})
	}
	q, has := r.URL.Query(), s.version.Load()
	asked, _ := strconv.ParseInt(q.Get("resourceVersion"), 10, 64)
	kind, version := "PodList", "v1"
	if strings.HasSuffix(r.URL.Path, Slices) {
		kind, version = "EndpointSliceList", "discovery.k8s.io/v1"
	} else if q.Get("watch") == "" {
		s.mu.Lock()
		s.lists = append(s.lists, q.Get("resourceVersion"))
		s.mu.Unlock()
	}
	switch {
	case q.Get("sendInitialEvents") != "":
		refuse(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, nil)
	case asked > has:
		w.Header().Set("Retry-After", "1")
		refuse(http.StatusGatewayTimeout, metav1.StatusReasonTimeout, &metav1.StatusDetails{
			RetryAfterSeconds: 1,
			Causes:            []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"}},
		})
	case q.Get("watch") != "":
		until := *s.until.Load() // before it counts as open: whoever has seen it open may end it
		s.open.Add(1)
		defer s.open.Add(-1)
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-until.Done():
		case <-r.Context().Done():
		}
	default:
		answer(http.StatusOK, metav1.PartialObjectMetadataList{
			TypeMeta: metav1.TypeMeta{Kind: kind, APIVersion: version}, ListMeta: metav1.ListMeta{ResourceVersion: strconv.FormatInt(has, 10)},
			Items: []metav1.PartialObjectMetadata{},
		})
	}
}

// watch runs a source until the test ends, and waits until it has listed and watches both kinds.
func (s *wire) watch() {
	client, err := NewClient(&rest.Config{Host: s.URL})
	require.NoError(s, err)
	ctx, cancel := context.WithCancel(s.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		New(Config{Client: client, Namespace: "llm", Selector: "app=vllm", RoleLabel: "role", Port: "80", Slices: true}).Run(ctx,
			func(_ []discover.Engine, err error) { s.told <- err })
	}()
	s.Cleanup(func() {
		cancel()
		<-done
		http.DefaultTransport.(*http.Transport).CloseIdleConnections() // client-go's for a server without TLS
	})
	s.hears("the first list", true)
	require.Eventually(s, func() bool { return s.open.Load() == 2 }, patience, time.Millisecond, "both are watched")
}

// hears waits for a list, or for a failure.
func (s *wire) hears(what string, good bool) {
	s.Helper()
	for end := time.After(patience); ; {
		select {
		case err := <-s.told:
			if (err == nil) == good {
				return
			}
		case <-end:
			require.Fail(s, "in vain: "+what)
		}
	}
}

// The connection ends without a fault, and the server takes new ones and closes them. client-go
// then makes one watch after the other that ends at once and without an error.
func TestAServerThatClosesEveryConnectionIsAway(t *testing.T) {
	s := newWire(t)
	s.watch()
	s.deaf.Store(true)
	s.endWatches()
	s.CloseClientConnections()
	s.hears("that it is away", false)
	s.deaf.Store(false)
	s.hears("a list, once it answers again", true)
}

// No connection is made in time. In this case, too, client-go returns an empty watch.
func TestAWatchWithoutAConnectionFails(t *testing.T) {
	slow := func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}
	}
	client, err := NewClient(&rest.Config{Host: "http://api:1", Dial: slow})
	require.NoError(t, err)
	w, err := client.Watch(t.Context(), Pods, "llm", metav1.ListOptions{})
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Nil(t, w)
}

// A server whose data were restored counts versions from an earlier one. A version that it refuses
// is asked for once, and then any version that it has.
func TestAfterARestoreWhatTheServerHasIsListed(t *testing.T) {
	s := newWire(t)
	s.watch()
	s.version.Store(40)
	s.mu.Lock()
	s.lists = nil
	s.mu.Unlock()
	s.endWatches()
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.lists) >= 2
	}, patience, time.Millisecond)
	s.mu.Lock()
	require.Equal(t, []string{"100", ""}, s.lists[:2])
	s.mu.Unlock()
	s.hears("a list", true)
}
