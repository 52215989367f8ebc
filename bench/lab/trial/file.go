package trial

import (
	"encoding/json"
	"io"
	"math"
	"reflect"
	"time"
)

// Format and Version are of the file that a trial writes. A version has the members of those before
// it.
const (
	Format  = "evenkeel-trial"
	Version = 1
)

// Report is a trial as its file has it. It has no prompts, no answers and no names of hosts.
type Report struct {
	Format   string  `json:"format"`
	Version  int     `json:"version"`
	Complete bool    `json:"complete"`
	Why      string  `json:"why,omitempty"` // it is not complete
	Short    bool    `json:"short,omitempty"`
	Seconds  float64 `json:"seconds"`

	Program Program      `json:"evenkeel"`
	Engine  *Engine      `json:"engine"`
	Each    float64      `json:"seconds_each_way"` // that a load should last
	Expects *Expectation `json:"expectation,omitempty"`
	Loads   []*Played    `json:"loads"`
	Law     Law          `json:"law"`

	Detail string    `json:"-"` // more of why, for people at this machine
	Began  time.Time `json:"began"`
}

// Program is evenkeel, and what it ran on.
type Program struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
	System  string `json:"system"`
	CPUs    int    `json:"cpus"`
	Policy  string `json:"policy"`
}

// JSON writes the file. A number that JSON does not have becomes 0 in the report, because one
// figure must not cost the others.
func (r *Report) JSON(w io.Writer) error {
	finite(reflect.ValueOf(r))
	enc := json.NewEncoder(w)
	enc.SetIndent("", " ")
	return enc.Encode(r)
}

// finite makes numbers 0 that are not finite, in all that a value leads to.
func finite(v reflect.Value) {
	switch v.Kind() {
	case reflect.Float64:
		if x := v.Float(); v.CanSet() && (math.IsNaN(x) || math.IsInf(x, 0)) {
			v.SetFloat(0)
		}
	case reflect.Pointer:
		finite(v.Elem()) // of nil, it is of no kind
	case reflect.Struct:
		for _, f := range v.Fields() {
			finite(f)
		}
	case reflect.Slice:
		for i := range v.Len() {
			finite(v.Index(i))
		}
	}
}
