package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

// legs are those of a request.
var legs = []string{"prefill", "decode"}

// difference is a field of a leg's body in which a router and evenkeel differ.
type difference struct{ leg, field, theirs, ours string }

// asked is what a client asks both for.
const asked = `{"model":"ref","messages":[{"role":"user","content":"What does a proxy send?"}],"max_tokens":8,"stream":true,"stream_options":{"include_usage":true}}`

// differ has a router and evenkeel serve the same request, and compares what the engines get.
func (b *bench) differ(ctx context.Context, p *peer) ([]difference, error) {
	theirs, err := b.record(ctx, p.connector, func(at string, e engines) (func(), error) { return p.run(ctx, b, at, e) })
	if err != nil {
		return nil, err
	}
	ours, err := b.record(ctx, p.connector, func(at string, e engines) (func(), error) {
		return b.evenkeel(ctx, p.connector, at, e)
	})
	if err != nil {
		return nil, fmt.Errorf("evenkeel: %w", err)
	}
	var list []difference
	for i, leg := range legs {
		list = append(list, compare(leg, theirs[i], ours[i])...)
	}
	return list, nil
}

// evenkeel serves with a connector.
func (b *bench) evenkeel(ctx context.Context, c refengine.Connector, at string, e engines) (func(), error) {
	proxy := b.world.Proxies("evenkeel-" + string(c))[0]
	profiles, prefill := "", []string{}
	for i, u := range e.prefill {
		profiles += fmt.Sprintf("  p%d: {connector: %s", i, c)
		if c == refengine.SGLang {
			profiles += ", bootstrap_port: " + e.rooms[i]
		}
		profiles += "}\n"
		prefill = append(prefill, fmt.Sprintf("url: %q, profile: p%d", u, i))
	}
	bind := ""
	if c == refengine.AscendLayerwise {
		bind = fmt.Sprintf("bind: {listen: %q}\n", testbed.FreeAddresses(1)[0])
	}
	err := proxy.ServeWith(ctx,
		fmt.Sprintf("listen: %q\nadmin: {listen: %q}\nself_test: false\nprofiles:\n%s%s", at, proxy.Address, profiles, bind)+
			testbed.Engines(prefill, testbed.EnginesAt(e.decode, ", profile: p0, slots: 16")))
	return proxy.Kill, err
}

// record serves the request once, by one engine of each kind, and returns the bodies that these
// got.
func (b *bench) record(ctx context.Context, c refengine.Connector,
	serve func(at string, e engines) (func(), error)) (bodies [2]map[string]any, err error) {
	all, err := b.ranks(c)
	if err != nil {
		return bodies, err
	}
	ranks := []*refengine.Engine{all[0], all[2]}
	var mu sync.Mutex
	var got [2][]byte
	var urls []string
	for i, e := range ranks {
		to, err := url.Parse(e.URLs()[0])
		if err != nil {
			return bodies, err
		}
		forward := &httputil.ReverseProxy{FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }}
		way := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/completions") {
				body, err := io.ReadAll(r.Body)
				if err != nil {
					return
				}
				mu.Lock()
				got[i] = body
				mu.Unlock()
				r.Body = io.NopCloser(bytes.NewReader(body))
			}
			forward.ServeHTTP(w, r)
		}))
		defer way.Close()
		urls = append(urls, way.URL)
	}
	at := testbed.FreeAddresses(1)[0]
	end, err := serve(at, engines{urls[:1], urls[1:], portsOf(ranks[:1])})
	if err != nil {
		return bodies, err
	}
	defer end()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	answer, err := testbed.Do(ctx, b.world.HTTP, http.MethodPost, "http://"+at+"/v1/chat/completions", []byte(asked), "Content-Type",
		"application/json")
	if err != nil {
		return bodies, err
	}
	if answer.Status != http.StatusOK {
		return bodies, fmt.Errorf("status %d: %s", answer.Status, answer.Body)
	}
	mu.Lock()
	defer mu.Unlock()
	for i := range got {
		if len(got[i]) == 0 {
			return bodies, errors.New("an engine got no request")
		}
		if err := json.Unmarshal(got[i], &bodies[i]); err != nil {
			return bodies, err
		}
	}
	return bodies, nil
}

// own are fields that are another one in each request, or name an engine.
var own = []string{"bootstrap_room", "bootstrap_host", "bootstrap_port", "rid", "request_id", "cache_salt", "remote_block_ids",
	"remote_engine_id", "remote_request_id", "remote_host",
	"remote_port", "remote_blocks_expiry_time", "remote_multi_nodes_meta_mapping", "metaserver"}

// compare lists the fields that two bodies do not share, and those of kv_transfer_params by
// themselves. Of fields that each request has for itself it counts only whether they are there.
func compare(leg string, theirs, ours map[string]any) (list []difference) {
	const nested = "kv_transfer_params"
	fields := slices.Sorted(maps.Keys(theirs))
	for name := range ours {
		if _, both := theirs[name]; !both {
			fields = append(fields, name)
		}
	}
	slices.Sort(fields)
	for _, name := range fields {
		a, there := theirs[name]
		b, here := ours[name]
		inA, isA := a.(map[string]any)
		inB, isB := b.(map[string]any)
		if name == nested && (isA || isB) {
			for _, d := range compare(leg, inA, inB) {
				d.field = nested + "." + d.field
				list = append(list, d)
			}
			continue
		}
		one, other := shown(name, a, there), shown(name, b, here)
		if one != other {
			list = append(list, difference{leg: leg, field: name, theirs: one, ours: other})
		}
	}
	return list
}

// absent stands for a field that is not there.
const absent = "–"

// told are the cells for a leg: what only the router sends, what only evenkeel sends, and what
// differs.
func told(leg string, all []difference) []string {
	var cells [3][]string
	for _, d := range all {
		field := "`" + d.field + "`"
		switch {
		case d.leg != leg:
		case d.ours == absent:
			cells[0] = append(cells[0], field+" "+d.theirs)
		case d.theirs == absent:
			cells[1] = append(cells[1], field+" "+d.ours)
		default:
			cells[2] = append(cells[2], field+" "+d.theirs+", "+d.ours)
		}
	}
	list := make([]string, len(cells))
	for i, c := range cells {
		list[i] = strings.Join(c, "; ")
	}
	return list
}

// shown is a field in the table.
func shown(name string, v any, there bool) string {
	switch {
	case !there:
		return absent
	case slices.Contains(own, name) && v != nil:
		return "one of its own"
	}
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return "`" + string(text) + "`"
}
