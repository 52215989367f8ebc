package cluster

import (
	"fmt"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
	"k8s.io/klog/v2"
)

// LogTo makes client-go write to log. By default client-go writes plain lines to
// standard error, which mix with the log's lines. Call LogTo once, before the first client
// of Kubernetes is made.
func LogTo(log *zap.Logger) { klog.SetLogger(logr.New(sink{log.Named("kubernetes").Sugar()})) }

// sink writes the log lines of client-go to log. It drops lines above level 0, which only help to
// debug client-go itself.
type sink struct{ log *zap.SugaredLogger }

var _ logr.LogSink = sink{}

func (sink) Init(logr.RuntimeInfo) {}

func (sink) Enabled(level int) bool { return level == 0 }

func (s sink) Info(_ int, msg string, pairs ...any) { s.log.Infow(msg, texts(pairs)...) }

func (s sink) Error(err error, msg string, pairs ...any) {
	s.log.Warnw(msg, append(texts(pairs), "error", err)...)
}

func (s sink) WithValues(pairs ...any) logr.LogSink { return sink{s.log.With(texts(pairs)...)} }

func (s sink) WithName(name string) logr.LogSink { return sink{s.log.Named(name)} }

// texts converts the keys and values of a log line to text. Some values are whole Kubernetes
// objects, which zap would write as nested JSON objects, with other fields for each kind of object.
func texts(pairs []any) []any {
	all := make([]any, len(pairs))
	for i, v := range pairs {
		all[i] = fmt.Sprint(v)
	}
	return all
}
