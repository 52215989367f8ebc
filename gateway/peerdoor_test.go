package gateway_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"evenkeel/bench/lab/refclient"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// knock sends a request as the peer with that id would.
func (c *cluster) knock(id, path, body string) reply {
	keys, err := geo.ParseKeys(geoKey)
	require.NoError(c, err)
	h := c.hopFrom(id, body)
	return c.deliver(path, body, append(papers(keys, path, &h), geo.TenantHeader, "t")...)
}

// hopFrom is how a peer sends a body to this dispatcher.
func (c *cluster) hopFrom(id, body string) geo.Hop {
	now := time.Now()
	return geo.Hop{
		N: 1, Max: 1, Origin: id, Via: []string{id}, RID: "r", Time: now.UnixMilli(), Nonce: nonce(), Deadline: now.Add(time.Minute).UnixMilli(),
		To: c.gw.Geo().ID(), Boot: c.boot(id), Digest: geo.DigestOf([]byte(body)),
	}
}

func nonce() string { return fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()) }

// papers are the headers of a hop that is signed for tenant t, and further headers that are signed
// with it.
func papers(keys *geo.Keys, path string, h *geo.Hop, header ...string) []string {
	m := geo.Message{Method: http.MethodPost, Target: path, Headers: []engine.Header{{Name: geo.TenantHeader, Value: "t"}}}
	for field := range slices.Chunk(header, 2) {
		m.Headers = append(m.Headers, engine.Header{Name: field[0], Value: field[1]})
	}
	return append([]string{geo.HopHeader, h.String(), geo.SignatureHeader, keys.Sign(&m, h)}, header...)
}

// deliver sends a request to the listener for other dispatchers.
func (c *cluster) deliver(path, body string, header ...string) reply {
	return c.Ask(http.MethodPost, "http://"+c.gw.GeoAddr()+path, body, header...)
}

// boot is the run of the proxy, as it answers a probe of the peer with that id.
func (c *cluster) boot(id string) string {
	keys, err := geo.ParseKeys(geoKey)
	require.NoError(c, err)
	now, body := time.Now(), fmt.Sprintf(`{"v":"1.0","id":%q}`, id)
	h := geo.Hop{
		N: 1, Max: 1, Origin: id, Via: []string{id}, RID: "probe", Time: now.UnixMilli(), Nonce: nonce(), Deadline: now.UnixMilli(),
		To: c.gw.Geo().ID(), Digest: geo.DigestOf([]byte(body)),
	}
	got := c.deliver(geo.ProbePath, body, append(papers(keys, geo.ProbePath, &h), geo.TenantHeader, "t")...)
	require.Equal(c, http.StatusOK, got.Status, got.Body)
	var a struct{ Boot string }
	require.NoError(c, json.Unmarshal([]byte(got.Body), &a))
	return a.Boot
}

// alone is us-1 whose only peer is gone.
func alone(t *testing.T, more func(*config.Config)) *cluster {
	return start(t, options{configure: func(cfg *config.Config) {
		region(t, cfg, "us-1", "127.0.0.1:0", "eu-1", freePorts(t, 1)[0])
		if more != nil {
			more(cfg)
		}
	}})
}

// us-1 has one peer, which does not run. What comes in its name is looked at all the same.
func TestAProxyWhosePeerIsGone(t *testing.T) {
	t.Parallel()
	const size, limit = 1 << 20, 4 << 20
	us := alone(t, func(cfg *config.Config) { cfg.Limits.Body, cfg.Limits.Bodies = size, limit })
	t.Run("a model that no engine in reach serves", func(t *testing.T) {
		us.hasEngines()
		got := us.Post(refclient.ChatPath, strings.Replace(chat("one", ""), model, "elsewhere", 1))
		require.Equal(t, http.StatusServiceUnavailable, got.Status, got.Body)
		require.Equal(t, "no_region_available", code(got.Body), "eu-1 may have it")
		require.Equal(t, "1", got.Header.Get("Retry-After"))
		require.Equal(t, http.StatusOK, us.Post(refclient.ChatPath, chat("one", "")).Status)
	})
	t.Run("a region without owners hands nothing back", func(t *testing.T) {
		for _, ask := range []string{`{"region":"us","epoch":1}`, `{"region":"us","group":"main","epoch":1}`} {
			got := us.knock("eu-1", geo.HandBackPath, ask)
			require.Equal(t, http.StatusConflict, got.Status, got.Body)
			require.Equal(t, "not_holder", code(got.Body))
		}
		require.Equal(t, http.StatusBadRequest, us.knock("eu-1", geo.HandBackPath, "{").Status)
	})
	t.Run("a bad signature is refused unread", func(t *testing.T) {
		h := us.hopFrom("eu-1", "")
		for name, signature := range map[string]string{
			"forged": "kid=a;v1=" + strings.Repeat("0", 64),
			"none":   "kid=b;v1=",
		} {
			conn, err := net.Dial("tcp", us.gw.GeoAddr())
			require.NoError(t, err)
			require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
			_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\n%s: %s\r\n%s: %s\r\n%s: t\r\nContent-Length: %d\r\n\r\n", refclient.ChatPath,
				geo.HopHeader, h.String(), geo.SignatureHeader, signature, geo.TenantHeader, 30<<20)
			require.NoError(t, err)
			got, err := http.ReadResponse(bufio.NewReader(conn), nil) // while no byte of the body has been sent
			require.NoError(t, err, name)
			require.Equal(t, http.StatusUnauthorized, got.StatusCode, name)
			require.Equal(t, geo.RejectSignature, got.Header.Get(geo.RejectHeader), name)
			_ = got.Body.Close()
			_ = conn.Close()
		}
	})
	t.Run("forged heads are refused unread", func(t *testing.T) {
		keys, err := geo.ParseKeys("a another-key-of-at-least-32-bytes\n")
		require.NoError(t, err)
		h := us.hopFrom("eu-1", "")
		head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 30000000\r\n%s: t\r\n", refclient.ChatPath,
			geo.TenantHeader)
		for field := range slices.Chunk(papers(keys, refclient.ChatPath, &h), 2) {
			head += field[0] + ": " + field[1] + "\r\n"
		}
		require.Equal(t, http.StatusUnauthorized, status(t, us.raw(us.gw.GeoAddr(), head+"\r\n")),
			"not a byte of the body was sent, or asked for")
		require.Zero(t, us.Metric("evenkeel_bodies_bytes"))
	})
	// What another proxy signs is the body as it is sent.
	t.Run("another proxy may pack a request", func(t *testing.T) {
		keys, err := geo.ParseKeys(geoKey)
		require.NoError(t, err)
		body := packed(t, "gzip", chat("one", ""))
		h := us.hopFrom("eu-1", body)
		r := us.deliver(refclient.ChatPath, body,
			append(papers(keys, refclient.ChatPath, &h, "Content-Encoding", "gzip"), geo.TenantHeader, "t")...)
		require.Equal(t, http.StatusOK, r.Status, r.Body)
	})
	// Other proxies' bodies are on the same account as those of clients.
	t.Run("bodies of peers are on the account of all bodies", func(t *testing.T) {
		keys, err := geo.ParseKeys(geoKey)
		require.NoError(t, err)
		body := strings.Repeat("x", size)
		var open []net.Conn
		for range 8 {
			h := us.hopFrom("eu-1", body)
			head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s: t\r\n", refclient.ChatPath, size, geo.TenantHeader)
			for field := range slices.Chunk(papers(keys, refclient.ChatPath, &h), 2) {
				head += field[0] + ": " + field[1] + "\r\n"
			}
			open = append(open, us.raw(us.gw.GeoAddr(), head+"\r\n"+body[1:]))
		}
		held := func() float64 { return us.Metric("evenkeel_bodies_bytes") }
		us.Eventually("those that fit are charged", func() bool { return held() >= 2*size })
		require.LessOrEqual(t, held(), float64(limit/2), "one address leaves room for another")
		require.Equal(t, http.StatusServiceUnavailable, status(t, open[len(open)-1]))
		for _, conn := range open {
			_ = conn.Close()
		}
		us.Eventually("all is given back", func() bool { return held() == 0 })
	})
}

// The engines of a region that is not ours any more are none. They are ours again with the store,
// and given back at the end.
func regionIsReleased(t *testing.T) {
	store := etcdServer(t)
	w := newWire(t, store)
	us := alone(t, func(cfg *config.Config) {
		o := &cfg.Geo.Ownership
		o.Engine, o.Etcd.Endpoints, o.Lease = geo.OwnEtcd, []string{"http://" + w.at}, haLease
	})
	us.hasEngines()
	us.Eventually("us-1 owns its region", func() bool { return us.gw.Owners()[0].Admits })
	require.True(t, strings.HasPrefix(kept(t, store, "evenkeel/owner/us/owner"), "us-1_"))
	require.Equal(t, http.StatusOK, us.Post(refclient.ChatPath, chat("one", "")).Status)
	fails := func() int { return us.logs.FilterMessageSnippet("a call to the lease's store").Len() }
	// On a busy machine, earlier calls may have taken too long. A call of a kind that fails already
	// tells nothing more.
	us.Eventually("no call fails", func() bool { return fails() == us.logs.FilterMessageSnippet("the call succeeds again").Len() })
	before := fails()
	w.set(true)
	us.Eventually("its time is over", func() bool { return us.gw.Owners()[0].Phase == "fenced" })
	got := us.Post(refclient.ChatPath, chat("one", ""))
	require.Equal(t, http.StatusServiceUnavailable, got.Status, got.Body)
	require.Equal(t, "no_region_available", code(got.Body))
	us.Eventually("calls fail again and again", func() bool { return fails() > before })
	time.Sleep(haLease) // nothing tells of a call that fails again: it must not
	require.Equal(t, before+1, fails())
	require.Zero(t, us.logs.FilterMessageSnippet("retrying").Len(), "nor does etcd's client warn with every call")

	w.set(false)
	us.Eventually("it is its region's owner again", func() bool { return us.gw.Owners()[0].Admits })
	require.NoError(t, us.gw.Shutdown(t.Context()))
	require.Empty(t, kept(t, store, "evenkeel/owner/us/owner"), "what ends gives back what it owns: nobody waits until it would have expired")
}

// code is an error's.
func code(body string) string {
	var e struct {
		Error struct{ Code string }
	}
	_ = json.Unmarshal([]byte(body), &e)
	return e.Error.Code
}

// A proxy that ends gives its group back before it is gone: nobody waits until it would have
// expired.
func groupIsReleased(t *testing.T) {
	store := etcdServer(t)
	us := start(t, options{dirty: true, configure: func(cfg *config.Config) {
		region(t, cfg, "us-1", "127.0.0.1:0", "us-2", freePorts(t, 1)[0])
		h := &cfg.HA
		h.Mode, h.Engine, h.Etcd.Endpoints = geo.HAStandby, geo.OwnEtcd, []string{"http://" + store}
		for i := range cfg.Engines.Decode {
			cfg.Engines.Decode[i].Group = "main"
		}
		h.Lease = haLease
	}})
	us.Eventually("us-1 owns the group", func() bool { return groupOf(us, "main").Admits })
	require.True(t, strings.HasPrefix(kept(t, store, "evenkeel/group/main/owner"), "us-1_"))
	epoch := groupOf(us, "main").Epoch
	got := us.knock("us-2", geo.HandBackPath, fmt.Sprintf(`{"region":"us","group":"main","epoch":%d}`, epoch))
	require.Equal(t, http.StatusConflict, got.Status, "us-2 does not live, and is not to have it: %s", got.Body)
	// On a busy machine, renewals may fail for a moment. With the same epoch, nobody else has owned
	// the group meanwhile.
	us.Eventually("us-1 owns the group", func() bool { return groupOf(us, "main").Admits })
	require.Equal(t, epoch, groupOf(us, "main").Epoch)
	require.NoError(t, us.gw.Shutdown(t.Context()))
	require.Empty(t, kept(t, store, "evenkeel/group/main/owner"))
}

// kept is what a key of the store says; empty: it is not there.
func kept(t *testing.T, store, key string) string {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + store}})
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	got, err := c.Get(t.Context(), key)
	require.NoError(t, err)
	if len(got.Kvs) == 0 {
		return ""
	}
	return string(got.Kvs[0].Value)
}
