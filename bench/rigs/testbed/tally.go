package testbed

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"evenkeel/bench/lab/load"
)

// Tally is what became of requests.
type Tally struct {
	Sent    int            `json:"sent"`
	Right   int            `json:"right"`
	Left    int            `json:"left"`    // by plan, or because the load was over
	Refused int            `json:"refused"` // a status and an error in words, before any of the answer
	Broken  int            `json:"broken"`  // an error event, after some of it
	Kinds   map[string]int `json:"kinds"`   // of what was not right
	Told    []load.Failure `json:"-"`       // failed as requests may, the refused and the broken ones among them
	Wrong   []load.Failure `json:"-"`       // failed as none may
}

// Count adds results up. may tells the failures that may be; everything else that is not right is
// wrong.
func Count(may func(load.Failure) bool, results ...*load.Result) *Tally {
	t := &Tally{Kinds: map[string]int{}}
	for _, r := range results {
		t.Sent += r.Sent
		t.Right += r.OK
		t.Left += r.Cancelled + r.Stopped
		for _, f := range r.Failures {
			t.Kinds[string(f.Kind)]++
			switch {
			case !may(f):
				t.Wrong = append(t.Wrong, f)
				continue
			case f.Kind.Refused():
				t.Refused++
			case f.Kind == load.ErrorEvent:
				t.Broken++
			}
			t.Told = append(t.Told, f)
		}
	}
	return t
}

// Told is for Count: the client was told of the failure.
func Told(f load.Failure) bool { return f.Kind.Refused() || f.Kind == load.ErrorEvent }

// None is for Count: no request may fail.
func None(load.Failure) bool { return false }

// All says that there were requests, and that every one was answered as it should be.
func (t *Tally) All() bool { return t.Right == t.Sent && t.Sent > 0 }

// AllRight holds that of a scene.
func (t *Tally) AllRight(r *Report, scene, who string) {
	r.Hold(t.All(), scene, "%s%d of %d right, %d lost, %s", who, t.Right, t.Sent, len(t.Told), t.First())
}

// NoneWrong holds that no request failed as none may.
func (t *Tally) NoneWrong(r *Report, scene, who string) {
	r.Hold(len(t.Wrong) == 0, scene, "%s%s", who, t.First())
}

// First is how many are wrong, and the words of the first of them.
func (t *Tally) First() string {
	text := fmt.Sprintf("%d wrong: ", len(t.Wrong))
	for i, f := range t.Wrong[:min(5, len(t.Wrong))] {
		text += []string{"", "; "}[min(i, 1)] + f.String()
	}
	return text
}

// String says how the requests ended, in one line.
func (t *Tally) String() string {
	ends := map[string]int{}
	for _, f := range t.Told {
		ends[name(f)]++
	}
	list := []string{fmt.Sprintf("%d right", t.Right)}
	for _, end := range slices.Sorted(maps.Keys(ends)) {
		list = append(list, fmt.Sprintf("%d %s", ends[end], end))
	}
	if len(t.Wrong) > 0 {
		list = append(list, t.First())
	}
	return strings.Join(list, ", ")
}

// coded is how the detail of an error event begins that has a code.
var coded = regexp.MustCompile(`^type "[^"]*", code "([^"]+)"`)

// name is how a request failed: the status and code of a refusal, the code of an error event, or
// the kind.
func name(f load.Failure) string {
	if status, refused := strings.CutPrefix(string(f.Kind), "http_"); refused {
		return "refused with " + strings.Replace(status, "/", " ", 1)
	}
	if code := coded.FindStringSubmatch(f.Detail); f.Kind == load.ErrorEvent && code != nil {
		return "`" + code[1] + "`"
	}
	return string(f.Kind)
}
