package fleetcall

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// engines are a fleet of two that decode in group a. Each answers as its handler does.
type engines struct {
	mu      sync.Mutex
	roster  *roster.Roster
	emptied []string
}

func (f *engines) apply(e roster.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.roster.Apply(e, time.Now(), nil)
	f.roster.Apply(roster.Tick{}, time.Now(), nil)
}

func (f *engines) Now() *roster.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	return roster.Derive(f.roster)
}

func (f *engines) Pause(group, path string) { f.apply(roster.PauseBegun{Group: group, Path: path}) }
func (f *engines) Resume(group string, unresumed []string) {
	f.apply(roster.PauseEnded{Group: group, Unresumed: unresumed})
}
func (f *engines) RecordEmptiedCaches(keys []string) {
	f.apply(roster.Emptied{Keys: keys})
	f.emptied = append(f.emptied, keys...)
}

// call is a caller of engines that answer so, and what was forgotten of their caches.
func call(t *testing.T, limit time.Duration, answers ...http.HandlerFunc) (c *Caller, f *engines, forgotten *int, ended func()) {
	f, forgotten = &engines{roster: roster.New()}, new(int)
	var keys []string
	for _, answer := range answers {
		server := httptest.NewServer(answer)
		t.Cleanup(server.Close)
		at, err := url.Parse(server.URL)
		require.NoError(t, err)
		p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
		id := at.Host
		target := &engine.Target{ID: id, URL: at, Rank: -1}
		keys = append(keys, "decode "+id)
		f.apply(roster.Entered{Engine: &roster.Engine{ID: id, Role: roster.Decode, Target: target, Profile: &p,
			Conf: config.Engine{Group: "a", Slots: 1}}})
	}
	for _, key := range keys {
		f.apply(roster.Health{Key: key, Status: engine.Status{Up: true, StartTime: 1}})
	}
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	var all sync.WaitGroup
	settings := &config.Config{FleetCall: config.FleetCall{Timeout: limit, Paths: paths}, Limits: config.Limits{ConnectTimeout: time.Second}}
	c = New(Deps{
		Context: t.Context(), Go: func(f func()) { all.Go(f) }, Log: zap.NewNop(), Client: client, Fleet: f,
		Settings: func() *config.Config { return settings },
		Forget:   func(_ []string, workers []int32) { *forgotten += len(workers) },
	})
	return c, f, forgotten, all.Wait
}

func says(status int, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text)
	}
}

func TestACallGoesToAllAndSaysWhatEachAnswered(t *testing.T) {
	asked := make(chan string, 4)
	c, f, forgotten, _ := call(t, time.Minute, func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		asked <- r.Method + " " + r.URL.String() + " " + r.Header.Get("Content-Type") + " " + string(text)
		says(200, `{"status":"paused"}`)(w, r)
	}, says(400, "not now"))
	r, wrong := c.Do(t.Context(), Call{Path: "/pause?mode=keep", Body: []byte(`{"a":1}`)}, "somebody")
	require.Nil(t, wrong)
	require.Equal(t, `POST /pause?mode=keep application/json {"a":1}`, <-asked)
	require.False(t, r.Done)
	require.Equal(t, []bool{true, false}, []bool{r.Engines[0].Done, r.Engines[1].Done})
	require.JSONEq(t, `{"status":"paused"}`, string(r.Engines[0].Body))
	require.JSONEq(t, `"not now"`, string(r.Engines[1].Body), "a text is a JSON string")
	require.Contains(t, r.Engines[1].Error, "answered 400")
	require.Len(t, r.Paused, 1)
	require.Len(t, f.Now().Pauses(), 1)
	require.Len(t, f.emptied, 2, "one that says that it did not may have begun")
	require.Equal(t, 2, *forgotten)
	r, wrong = c.Do(t.Context(), Call{Path: "/resume"}, "somebody")
	require.Nil(t, wrong)
	require.False(t, r.Done)
	<-asked
	require.Len(t, f.Now().Pauses(), 1, "the second stays paused alone")
}

// One call runs at a time, also without its caller.
func TestACallGoesOnWithoutItsCaller(t *testing.T) {
	begun, answer := make(chan bool), make(chan bool)
	c, f, _, ended := call(t, time.Minute, func(w http.ResponseWriter, r *http.Request) {
		begun <- true
		<-answer
		says(200, "")(w, r)
	})
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan *Refusal)
	go func() {
		_, wrong := c.Do(ctx, Call{Path: "/pause"}, "somebody")
		left <- wrong
	}()
	<-begun
	leave()
	require.Contains(t, (<-left).Reason, "goes on without its caller")
	_, wrong := c.Do(t.Context(), Call{Path: "/resume"}, "somebody else")
	require.Equal(t, http.StatusConflict, wrong.Status)
	require.Contains(t, wrong.Reason, "another call is under way: /pause")
	close(answer)
	ended()
	require.Len(t, f.Now().Pauses(), 1)
	go func() { <-begun }()
	r, wrong := c.Do(t.Context(), Call{Path: "/resume"}, "somebody")
	require.Nil(t, wrong)
	require.True(t, r.Done)
	require.Empty(t, r.Paused)
}

func TestAnEngineThatDoesNotAnswerInTime(t *testing.T) {
	over := make(chan bool)
	defer close(over)
	c, f, _, _ := call(t, 100*time.Millisecond, func(http.ResponseWriter, *http.Request) { <-over })
	r, wrong := c.Do(t.Context(), Call{Path: "/pause"}, "somebody")
	require.Nil(t, wrong)
	require.False(t, r.Done)
	require.Contains(t, r.Engines[0].Error, "no answer came within fleet_call.timeout (100ms)")
	require.Len(t, f.Now().Pauses(), 1, "it may have paused")
}

// Whatever an engine answers, the result is JSON, and not much larger than the answers.
func TestAnEnginesBodyDoesNotSpoilTheResult(t *testing.T) {
	const most = mostBody / 2
	for name, row := range map[string]struct {
		body, want string
		done       bool
	}{
		"an object":                        {`{"a":{"b":[1,{"c":2}]}}`, `{"a":{"b":[1,{"c":2}]}}`, true},
		"deep lists":                       {strings.Repeat("[", most) + strings.Repeat("]", most), "", true},
		"a deep object":                    {strings.Repeat(`{"a":`, 30) + "1" + strings.Repeat("}", 30), "", true},
		"a deep one that says no":          {`{"success":false,"why":` + strings.Repeat("[", 30) + strings.Repeat("]", 30) + "}", "", false},
		"a deep list after a large number": {"[1e999," + strings.Repeat("[", 4000) + strings.Repeat("]", 4000) + "]", "", true},
		"no UTF-8":                         {"{\"a\":\"\xff\"}", `"{\"a\":\"�\"}"`, true},
		"no UTF-8 that says no":            {"{\"success\":false,\"a\":\"\xff\"}", "", false},
		"many numbers":                     {"[" + strings.Repeat("1,", most-1) + "1]", "", true},
		"brackets in a text":               {`{"a":"` + strings.Repeat("[", 100) + `\""}`, `{"a":"` + strings.Repeat("[", 100) + `\""}`, true},
	} {
		t.Run(name, func(t *testing.T) {
			c, _, _, _ := call(t, time.Minute, says(200, row.body))
			r, wrong := c.Do(t.Context(), Call{Path: "/resume"}, "somebody")
			require.Nil(t, wrong)
			require.Equal(t, row.done, r.Engines[0].Done, r.Engines[0].Error)
			if row.want != "" {
				require.JSONEq(t, row.want, string(r.Engines[0].Body))
			}
			all, err := json.MarshalIndent(r, "", "  ")
			require.NoError(t, err)
			require.Less(t, len(all), 20*mostBody)
			require.True(t, utf8.Valid(all))
		})
	}
}
