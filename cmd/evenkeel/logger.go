package main

import (
	"encoding/json"
	"io"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newLogger writes JSON lines to out, without sampling: an SRE needs every line
// of the one request that failed.
func newLogger(level string, out io.Writer) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, err
	}
	enc := zap.NewProductionEncoderConfig()
	enc.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	core := zapcore.NewCore(zapcore.NewJSONEncoder(enc), zapcore.Lock(zapcore.AddSync(&logOutput{out: out})), l)
	return zap.New(core, zap.AddCaller(), zap.AddStacktrace(zapcore.DPanicLevel)), nil
}

// logOutput counts the lines that cannot be written, because the reader of a
// pipe has gone or a disk is full, and tells of them once one can be written.
type logOutput struct {
	out  io.Writer
	lost int
	why  error // of the first
}

// Write writes one line. zap calls it under a lock.
func (o *logOutput) Write(line []byte) (int, error) {
	n, err := o.out.Write(line)
	switch {
	case err != nil:
		if o.lost++; o.lost == 1 {
			o.why = err
		}
	case o.lost > 0:
		told, _ := json.Marshal(map[string]any{ // of plain values: it does not fail
			"level": "warn", "ts": time.Now().Format(time.RFC3339Nano), "msg": "log lines before this one could not be written and are lost",
			"lines_lost": o.lost, "error": o.why.Error(),
		})
		if _, err := o.out.Write(append(told, '\n')); err == nil {
			o.lost = 0
		}
	}
	return n, err
}
