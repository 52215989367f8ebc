package gateway_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/geo"
)

// sibling is a proxy of the region us that says it owns the group main.
func sibling(t *testing.T, id string, serve http.HandlerFunc) (at string) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != geo.ProbePath {
			serve(w, r)
			return
		}
		var q struct{ Seq uint64 }
		_ = json.NewDecoder(r.Body).Decode(&q)
		_, _ = fmt.Fprintf(w, `{"v":"1.0","id":%q,"region":"us","boot":%q,"seq":%d,"proc_us":5,"groups":{"main":7},"decodes":[%q],"models":{%q:%s}}`, id, id, q.Seq, model, model, honest)
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// standby is us-1, which has the engines and reaches no store: others own them.
func standby(t *testing.T, serve http.HandlerFunc) *cluster {
	o := takesMessages(options{})
	o.configure = func(cfg *config.Config) {
		region(t, cfg, "us-1", "127.0.0.1:0", "us-2", sibling(t, "us-2", serve), "us-3", sibling(t, "us-3", serve))
		h := &cfg.HA
		h.Mode, h.Engine, h.Etcd.Endpoints = geo.HAStandby, geo.OwnEtcd, []string{"http://" + freePorts(t, 1)[0]}
		h.Lease = haLease
		for i := range cfg.Engines.Decode {
			cfg.Engines.Decode[i].Group = "main"
		}
	}
	return start(t, o)
}

// A proxy that does not admit to the decode group forwards requests to the two that say that they
// do.
func TestRequestsOfAGroupOfOthers(t *testing.T) {
	t.Parallel()
	owners, ran := &stub{}, atomic.Int32{}
	us := standby(t, owners.ServeHTTP)
	known := func(t *testing.T) { // one that failed is asked again a moment later
		us.Eventually("both siblings are there",
			func() bool { return us.availability("us-2") == "available" && us.availability("us-3") == "available" })
		ran.Store(0)
	}
	// It refuses what it may not send to the one that does.
	t.Run("responses and messages are refused", func(t *testing.T) {
		owners.does(func(http.ResponseWriter, *http.Request) { t.Error("it was forwarded") })
		known(t)
		r := us.Post(refclient.ResponsesPath, refclient.Response("a", ""))
		require.Equal(t, http.StatusServiceUnavailable, r.Status, r.Body)
		said, _, _ := refclient.Failure(t, r)
		require.Equal(t, geo.RejectOwner, said)
		require.NotEmpty(t, r.Header.Get("Retry-After"))
		r = us.Post(refclient.MessagesPath, refclient.Message("a", `"stream":true,`))
		require.Equal(t, http.StatusServiceUnavailable, r.Status, r.Body)
		kind, says := answertest.Refused(t, r.Body)
		require.Equal(t, "overloaded_error", kind)
		require.Contains(t, says, "another proxy")
		got := us.knock("us-2", refclient.ChatPath, chat("one", "")) // nor may it forward what came from another proxy
		require.Equal(t, http.StatusServiceUnavailable, got.Status, got.Body)
		require.Equal(t, geo.RejectOwner, got.Header.Get(geo.RejectHeader))
		require.Equal(t, geo.RejectOwner, code(got.Body))
		require.Zero(t, us.Decode[0].Stats().Requests)
		require.Zero(t, us.Prefill[0].Stats().Requests)
	})
	// One that was surely not run is asked about again, until it is served.
	t.Run("one that was refused by non-owners goes to the next", func(t *testing.T) {
		owners.does(func(w http.ResponseWriter, _ *http.Request) {
			if ran.Add(1) < 4 {
				w.Header().Set(geo.RejectHeader, geo.RejectOwner)
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"id":"x","choices":[]}`)
		})
		known(t)
		before := len(us.receipts())
		got := us.Post(refclient.ChatPath, chat("one", ""))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.EqualValues(t, 4, ran.Load())
		require.Less(t, len(us.receipts())-before, 5, "who said no is asked again only once it says that it is")
	})
	for name, body := range map[string]string{"one answer": chat("one", `"stream":true,`), "several": chat("one", `"n":2,`)} {
		t.Run("one that two owners may have run is not run a third time, "+name, func(t *testing.T) {
			owners.does(func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				ran.Add(1)
				panic(http.ErrAbortHandler)
			})
			known(t)
			got := us.Post(refclient.ChatPath, body)
			require.Equal(t, http.StatusServiceUnavailable, got.Status, got.Body)
			require.Equal(t, "owner_lost", code(got.Body))
			require.EqualValues(t, 2, ran.Load())
		})
	}
}
