package roster

import (
	"errors"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// scene is a roster that a test tells of events, and what was published last.
type scene struct {
	t testing.TB
	*Snapshot
	r   *Roster
	now time.Time
	do  []Effect // of the last events
}

// begin has engines: a role's letter and a number, such as d2, then what is special: "/2" is a
// number of ranks, "@eu" a region, "+g" a group, "~nixl-pull" a connector, "=0" no barrier.
func begin(t testing.TB, engines string) *scene {
	s := &scene{t: t, r: New(), now: time.Unix(1000, 0)}
	s.tell(Terms{ProbeTimeout: time.Minute, Prefer: config.PreferPD, Started: s.now})
	for _, e := range strings.Fields(engines) {
		s.tell(Entered{Engine: described(e)})
	}
	return s
}

// tell has the roster take events, and a tick after them.
func (s *scene) tell(events ...Event) {
	s.do = s.do[:0]
	for _, e := range append(events, Tick{}) {
		s.do = s.r.Apply(e, s.now, s.do)
	}
	s.Snapshot = Derive(s.r)
}

// described is the engine that a word describes.
func described(word string) *Engine {
	at := strings.IndexAny(word, "/@+~=")
	if at < 0 {
		at = len(word)
	}
	name, more := word[:at], word[at:]
	p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
	e := &Engine{
		ID: name + ":80", Role: map[byte]string{'p': Prefill, 'd': Decode, 'a': Aggregated}[name[0]], Profile: &p, Hosts: []string{name},
		Target: &engine.Target{ID: name + ":80", URL: &url.URL{Scheme: "http", Host: name + ":80"}, Rank: -1},
		Conf:   config.Engine{Profile: "a", Group: "main", Barrier: config.BarrierDP, Slots: 20},
	}
	for more != "" {
		end := strings.IndexAny(more[1:], "/@+~=") + 1
		if end == 0 {
			end = len(more)
		}
		switch value := more[1:end]; more[0] {
		case '/':
			e.Conf.Ranks, _ = strconv.Atoi(value)
		case '@':
			e.Conf.Region = value
		case '+':
			e.Conf.Group = value
		case '~':
			p = mooncake.Profile{Connector: value}.WithDefaults()
		case '=':
			e.Conf.Barrier = config.BarrierNone
		}
		more = more[end:]
	}
	return e
}

func key(name string) string {
	return map[byte]string{'p': Prefill, 'd': Decode, 'a': Aggregated}[name[0]] + " " + name + ":80"
}

var errFailed = errors.New("500")

// health is a status in words: up, down, late, halted, out, wedged, accused, retired, lost1, and
// what it lists.
func health(word string, names ...string) engine.Status {
	s := engine.Status{Up: true, StartTime: 1}
	for i, name := range names {
		m := engine.Model{ID: name}
		if i > 0 {
			m.Parent = names[0]
		}
		s.Models = append(s.Models, m)
	}
	for w := range strings.SplitSeq(word, ",") {
		switch w {
		case "up":
		case "down":
			s.Up, s.Err = false, errFailed
		case "late":
			s.Up, s.Late = false, true
		case "halted":
			s.Halt = engine.ErrReforming
		case "out":
			s.Out = errFailed
		case "wedged":
			s.Out, s.Wedged = errFailed, true
		case "accused":
			s.Accused = errFailed
		case "retired":
			s.Up, s.Err = false, engine.ErrRetired
		case "lost1":
			s.RankCount = 1
		case "restarted":
			s.StartTime = 2
		default:
			panic(w)
		}
	}
	return s
}

// steps takes steps in words, each ended by a semicolon: "d2 up m x" is a health and what is
// listed; "d2 drains", "d2/1 drains", "d2 resumes", "d2 leaves", "d2 enters", "d2 away", "d2 back";
// "wait 10s".
func (s *scene) steps(all string) *scene {
	for step := range strings.SplitSeq(all, ";") {
		f := strings.Fields(step)
		if len(f) == 0 {
			continue
		}
		name, rank, _ := strings.Cut(f[0], "/")
		role := ""
		if f[0] != "wait" {
			role, _, _ = strings.Cut(key(name), " ")
			if rank != "" {
				rank = "/" + rank
			}
		}
		switch what := f[1]; {
		case f[0] == "wait":
			d, err := time.ParseDuration(what)
			require.NoError(s.t, err)
			s.now = s.now.Add(d)
			s.tell()
		case what == "drains":
			drain, err := s.NewDrain(role, name+":80"+rank, s.now)
			require.NoError(s.t, err)
			if len(f) > 2 {
				d, err := time.ParseDuration(f[2])
				require.NoError(s.t, err)
				drain.Deadline = s.now.Add(d)
			}
			s.tell(Stopped{drain})
		case what == "resumes":
			s.tell(Resumed{key(name) + rank})
		case what == "leaves":
			s.tell(Removed{key(name)})
		case what == "enters":
			s.tell(Entered{Engine: described(f[0])})
		case what == "away":
			s.tell(Turned{key(name), Found{Away: "not ready"}})
		case what == "back":
			s.tell(Turned{key(name), Found{}})
		default:
			s.tell(Health{Key: key(name), Status: health(what, f[2:]...)})
		}
	}
	return s
}

// shows are the lines of a kind that are published, without the kind.
func (s *scene) shows(kind string) (lines []string) {
	for _, line := range s.Text() {
		if rest, ok := strings.CutPrefix(line, kind+" "); ok {
			lines = append(lines, rest)
		}
	}
	return lines
}

// states are those of all ranks, by engine and rank.
func (s *scene) states() map[string]RankState {
	all := map[string]RankState{}
	for _, k := range s.r.order {
		e := s.r.engines[k]
		for _, rank := range e.Ranks() {
			all[e.rankDrainKey(rank)] = s.r.stateOfRank(e, rank)
		}
	}
	return all
}

func (s *scene) whats() (all []What) {
	for _, e := range s.do {
		if e.What != WatchEngines {
			all = append(all, e.What)
		}
	}
	return slices.Clip(all)
}
