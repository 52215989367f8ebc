package recording

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
)

var rostersOf = flag.String("rosters", "", "a pattern of files that `go run ./bench/rigs/chaos -record FILE` wrote beside FILE: what was "+
	"told there is told again, and with -update they become testdata/rosters.jsonl.gz")

var update = flag.Bool("update", false, "write the recording that is kept")

// What real rosters were told, in chaos runs of each connector, leads to the same effects and lists
// once more. testdata/rosters.jsonl.gz is what was recorded; `make recording` makes it anew, and
// -update without -rosters writes what rosters do now, which is to be read then.
func TestRecordedRostersPublishAgainWhatTheyDid(t *testing.T) {
	const kept = "testdata/rosters.jsonl.gz"
	var text []byte
	if *rostersOf != "" {
		files, err := filepath.Glob(*rostersOf)
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range files {
			one, err := os.ReadFile(file)
			require.NoError(t, err)
			replay(t, one, false)
			text = append(text, one...)
		}
		if !*update {
			return
		}
		keep(t, kept, text)
	}
	f, err := os.Open(kept)
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	text, err = io.ReadAll(z)
	require.NoError(t, err)
	kinds, states, now := replay(t, text, *update)
	if *update {
		keep(t, kept, now)
	}
	for _, kind := range []string{"roster.Terms", "roster.Entered", "roster.Health", "roster.Handed", "roster.Lived"} {
		require.Positive(t, kinds[kind], kind)
	}
	require.Greater(t, states, 20, "lists that differ from those before")
	t.Log(kinds, states)
}

func keep(t *testing.T, name string, text []byte) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, err := z.Write(text)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	require.NoError(t, os.WriteFile(name, b.Bytes(), 0o644)) //nolint:gosec // test data
}

// replay tells rosters what was told then. The files of several runs may follow each other, in each
// of which tapes are numbered from 1. If it is to change them, what rosters do now takes the place
// of what they did.
func replay(t *testing.T, text []byte, change bool) (kinds map[string]int, lists int, now []byte) {
	kinds = map[string]int{}
	all, last := map[int64]*roster.Roster{}, map[int64][]string{}
	for line := range bytes.Lines(text) {
		var l moment
		require.NoError(t, json.Unmarshal(line, &l), "%s", line)
		if len(l.Events) > 0 && l.Events[0].Kind == "begun" {
			all[l.ID], last[l.ID] = roster.New(), nil
			now = append(now, line...)
			continue
		}
		r := all[l.ID]
		require.NotNil(t, r, "%s", line)
		var do []roster.Effect
		for _, e := range l.Events {
			kinds[e.Kind]++
			do = r.Apply(eventOf(t, e), l.At, do)
		}
		var did []string
		for _, e := range r.Apply(roster.Tick{}, l.At, do) {
			did = append(did, fmt.Sprint(e.What))
		}
		published := roster.Derive(r).Text()
		if change {
			l.Do, l.Lists = did, nil
			if !slices.Equal(last[l.ID], published) {
				l.Lists = published
			}
		}
		require.Equal(t, l.Do, did, "%s", line)
		if l.Lists != nil {
			lists++
			last[l.ID] = l.Lists
		}
		require.Equal(t, last[l.ID], published, "%s", line)
		again, err := json.Marshal(l)
		require.NoError(t, err)
		now = append(append(now, again...), '\n')
	}
	return kinds, lists, now
}

// eventOf reads an event.
func eventOf(t *testing.T, e event) roster.Event {
	switch e.Kind {
	case "roster.Entered":
		var v entered
		require.NoError(t, json.Unmarshal(e.Of, &v))
		return roster.Entered{Engine: engineOf(t, v.Engine), EndDrains: v.Anew}
	case "roster.Planned":
		var v planned
		require.NoError(t, json.Unmarshal(e.Of, &v))
		p := roster.Planned{Remove: v.Remove, Order: v.Order}
		for _, one := range v.Set {
			p.Set = append(p.Set, engineOf(t, one))
		}
		return p
	case "roster.Health":
		var v health
		require.NoError(t, json.Unmarshal(e.Of, &v))
		s := v.Status
		for to, text := range map[*error]string{&s.Err: v.Err, &s.Out: v.Out, &s.Accused: v.Accused, &s.Halt: v.Halt} {
			if text != "" {
				*to = errors.New(text)
			}
		}
		if v.Retired {
			s.Err = engine.ErrRetired
		}
		if v.Held {
			s.Halt = &engine.Held{Why: v.Halt}
		}
		if v.Paused {
			s.Halt = engine.ErrPaused
		}
		return roster.Health{Key: v.Key, Status: s, IsRefused: v.IsRefused}
	}
	return map[string]func(json.RawMessage) roster.Event{
		"roster.Terms": as[roster.Terms](t), "roster.Owners": as[roster.Owners](t), "roster.Removed": as[roster.Removed](t), "roster.Left": as[roster.Left](t),
		"roster.Turned": as[roster.Turned](t), "roster.Lived": as[roster.Lived](t), "roster.Handed": as[roster.Handed](t), "roster.GaveBack": as[roster.GaveBack](t),
		"roster.Stopped": as[roster.Stopped](t), "roster.Resumed": as[roster.Resumed](t),
		"roster.PauseBegun": as[roster.PauseBegun](t), "roster.PauseEnded": as[roster.PauseEnded](t), "roster.Emptied": as[roster.Emptied](t),
		"roster.Located": as[roster.Located](t),
	}[e.Kind](e.Of)
}

func as[E roster.Event](t *testing.T) func(json.RawMessage) roster.Event {
	return func(of json.RawMessage) roster.Event {
		var v E
		require.NoError(t, json.Unmarshal(of, &v))
		return v
	}
}

func engineOf(t *testing.T, d described) *roster.Engine {
	at, err := url.Parse(d.Conf.URL)
	require.NoError(t, err)
	return &roster.Engine{
		ID: d.ID, Role: d.Role, Conf: d.Conf, Profile: d.Profile, Hosts: d.Hosts, Found: d.Found, FromNewEntry: d.Own,
		Target: &engine.Target{ID: d.ID, URL: at, Rank: -1},
	}
}

// What is written of each kind of event leads to the same lists when it is read.
func TestARosterIsRecordedSoThatItCanBeToldAgain(t *testing.T) {
	name := filepath.Join(t.TempDir(), "recording")
	rostersFile = openBeside(name)
	t.Cleanup(func() {
		require.NoError(t, rostersFile.Close())
		rostersFile = nil
		written.Store(0)
	})
	p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
	known := func(role string, port string) *roster.Engine {
		return engineOf(t,
			described{ID: "e:" + port, Role: role, Profile: &p, Conf: config.Engine{URL: "http://e:" + port, Slots: 4, Group: "g"}})
	}
	up := engine.Status{Up: true, StartTime: 1, Models: []engine.Model{{ID: "m"}}}
	failed := up
	failed.Out, failed.Accused, failed.Halt = errors.New("500"), errors.New("500"), errors.New("re-forms")
	retired := engine.Status{Err: engine.ErrRetired, Models: up.Models}
	stop := roster.Drain{Role: roster.Decode, ID: "e:2", At: roster.Location{Instance: "decode e:2", Rank: -1}, Deadline: time.Unix(60, 0)}
	r, now := roster.New(), time.Unix(0, 0)
	var tape Roster
	for _, events := range [][]roster.Event{
		{roster.Terms{SlowStart: time.Minute}, roster.Entered{Engine: known(roster.Prefill, "1")}, roster.Owners{}},
		{roster.Terms{SlowStart: time.Minute}, roster.Planned{Set: []*roster.Engine{known(roster.Decode, "2"), known(roster.Aggregated, "3")}, Order: []string{"decode e:2"}}, roster.Owners{}},
		{roster.Health{Key: "prefill e:1", Status: up}, roster.Health{Key: "decode e:2", Status: up}, roster.Health{Key: "aggregated e:3", Status: up}},
		{roster.Health{Key: "decode e:2", Status: failed}, roster.Health{Key: "aggregated e:3", Status: retired}, roster.Health{Key: "prefill e:1", IsRefused: true}},
		{roster.Handed{Made: roster.Generation{Key: "prefill e:1"}, ID: "a"}, roster.Lived{Key: "prefill e:1", Start: 3}},
		{roster.Health{Key: "decode e:2", Status: up}, roster.Stopped{Drain: stop}},
		{roster.Turned{Key: "prefill e:1", Found: roster.Found{Away: "leaving"}}, roster.GaveBack{Key: "decode e:2"}},
		{roster.Owners{Kind: owner.Groups, Scopes: map[string]roster.Owned{"g": {Admits: true}}, Quotas: map[string]roster.RankQuota{"e:3": {Limit: 1}}}},
		{roster.Resumed{Key: "decode e:2"}, roster.Removed{Key: "aggregated e:3"}, roster.Left{Key: "prefill e:1"}},
	} {
		var do []roster.Effect
		for _, e := range append(events, roster.Tick{}) {
			do = r.Apply(e, now, do)
		}
		tape.Step(now, events, do, roster.Derive(r))
		now = now.Add(10 * time.Second)
	}
	text, err := os.ReadFile(name + ".rosters")
	require.NoError(t, err)
	kinds, lists, again := replay(t, text, false)
	require.Equal(t, string(text), string(again))
	require.Len(t, kinds, 13, "kinds of events")
	require.Equal(t, 1, kinds["roster.Terms"], "what is said again is not written again")
	require.Equal(t, 6, lists, "lists that are others than before")
}
