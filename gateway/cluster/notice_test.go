package cluster_test

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/klog/v2"

	"evenkeel/engine/discover"
	"evenkeel/engine/discover/kube"
	"evenkeel/gateway/cluster"
)

// relay stands between two ends and can fall silent: it keeps its connections,
// takes new ones, and passes nothing on.
type relay struct {
	net.Listener
	to string

	mu     sync.Mutex
	conns  []net.Conn
	silent bool
}

func (r *relay) run() {
	for {
		near, err := r.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		r.conns = append(r.conns, near)
		silent := r.silent
		r.mu.Unlock()
		if silent {
			continue
		}
		far, err := net.Dial("tcp", r.to)
		if err != nil {
			_ = near.Close()
			continue
		}
		r.mu.Lock()
		r.conns = append(r.conns, far)
		r.mu.Unlock()
		go r.pass(near, far)
		go r.pass(far, near)
	}
}

func (r *relay) pass(from, to net.Conn) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		r.mu.Lock()
		silent := r.silent
		r.mu.Unlock()
		if silent {
			return
		}
		if err != nil {
			_ = to.Close()
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// fall makes it silent, or ends that together with the connections that suffered.
func (r *relay) fall(silent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.silent = silent
	if !silent {
		for _, c := range r.conns {
			_ = c.Close()
		}
		r.conns = nil
	}
}

// An API server that is gone without a word is noticed in seconds, and not by
// the half minutes of client-go; until then and after nothing is believed fresh.
func TestAConnectionThatIsDeadAndOpenIsNoticed(t *testing.T) {
	t.Parallel()
	watched := make(chan struct{}, 100)
	api := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("watch") == "" {
			_, _ = fmt.Fprint(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[]}`)
			return
		}
		if r.URL.Query().Get("sendInitialEvents") != "" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		watched <- struct{}{}
		<-r.Context().Done()
	}))
	api.EnableHTTP2 = true
	api.StartTLS()
	defer api.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	between := &relay{Listener: listener, to: api.Listener.Addr().String()}
	go between.run()
	defer between.fall(false)
	defer listener.Close()

	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.pem")
	require.NoError(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: api.Certificate().Raw}), 0o600))
	kubeconfig := filepath.Join(dir, "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, fmt.Appendf(nil,
		`{"clusters":[{"name":"c","cluster":{"server":"https://%s","certificate-authority":%q}}],"contexts":[{"name":"c","context":{"cluster":"c"}}],"current-context":"c"}`, listener.Addr(), ca), 0o600))
	server, namespace, err := cluster.Find(kubeconfig, "llm")
	require.NoError(t, err)
	client, err := kube.NewClient(server)
	require.NoError(t, err)

	told := make(chan error, 100)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		kube.New(kube.Config{Client: client, Namespace: namespace, Selector: "app=vllm", RoleLabel: "role", Port: "80"}).Run(ctx,
			func(_ []discover.Engine, err error) { told <- err })
	})
	defer wg.Wait()
	defer cancel()
	hear := func(what string, want bool, within time.Duration) {
		t.Helper()
		for end := time.After(within); ; {
			select {
			case err := <-told:
				if (err == nil) == want {
					return
				}
			case <-end:
				require.Fail(t, "in vain: "+what)
			}
		}
	}
	hear("the first list", true, 30*time.Second)
	<-watched
	between.fall(true)
	hear("that the server is gone", false, 35*time.Second)
	between.fall(false)
	hear("a list, once it answers again", true, time.Minute)
}

// What client-go has to say is a line of our log.
func TestClientGoWritesIntoOurLog(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	cluster.LogTo(zap.New(core))
	defer klog.ClearLogger()
	klog.Warningf("an old API: %s", "v1beta1")
	klog.ErrorS(errors.New("refused"), "it failed", "where", struct{ Name string }{"api"})
	klog.V(4).Info("for those who debug it")
	require.Equal(t, 2, logs.Len())
	require.Equal(t, "an old API: v1beta1", logs.All()[0].Message)
	require.Equal(t, "kubernetes", logs.All()[0].LoggerName)
	require.Equal(t, map[string]any{"where": "{api}", "error": "refused"}, logs.All()[1].ContextMap())
}
